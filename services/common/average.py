"""A running mean of a learner's weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """Exponential moving average of parameters, in float32 and host memory: of what this rank holds of each."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        """Begins at the parameters as they are."""
        self._parameters = parameters
        self._decay = decay
        self._means = [_held(parameter).to("cpu", torch.float32, copy=True) for parameter in parameters]

    def update(self) -> None:
        """mean = decay * mean + (1 - decay) * parameter, for each."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(_held(parameter).to("cpu", torch.float32), 1 - self._decay)

    @property
    def means(self) -> list[torch.Tensor]:
        """In the order of the parameters, each of the shape that this rank holds."""
        return self._means

    def load(self, means: Sequence[torch.Tensor]) -> None:
        """Goes on from these, given as `means` gives them."""
        _copy(means, self._means)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters are their means, rounded to their dtype, until this is left. Every rank enters it."""
        for parameter in self._parameters:
            if hasattr(parameter, "ds_tensor") and parameter.data.numel():
                # ZeRO 3 keeps small ones whole beside their partitions; from now on it shall gather the partitions.
                parameter.partition()
        pieces = [_held(parameter) for parameter in self._parameters]
        kept = [piece.clone() for piece in pieces]
        try:
            _copy(self._means, pieces)
            yield
        finally:
            _copy(kept, pieces)


def _held(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter: with ZeRO 3 its partition, otherwise all of it."""
    held: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data
    return held


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
