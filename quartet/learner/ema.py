"""A running mean of a learner's weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """Exponential moving average of this rank's share of each parameter, in float32 and in host memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        """Starts from the parameters' present values."""
        self._parameters = parameters
        self._decay = decay
        self.means = [local_share(parameter).to("cpu", torch.float32, copy=True) for parameter in parameters]
        """The means in the order of the parameters, each with the shape of this rank's share."""

    def update(self) -> None:
        """mean = decay * mean + (1 - decay) * parameter, for each."""
        for mean, parameter in zip(self.means, self._parameters, strict=True):
            mean.lerp_(local_share(parameter).to("cpu", torch.float32), 1 - self._decay)

    def load(self, means: Sequence[torch.Tensor]) -> None:
        """Replaces the means by these, in the form of `means`."""
        _copy(means, self.means)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the parameters hold their means, rounded to their dtype. Every rank enters it."""
        self._drop_whole()
        pieces = [local_share(parameter) for parameter in self._parameters]
        kept = [piece.clone() for piece in pieces]
        try:
            _copy(self.means, pieces)
            yield
        finally:
            _copy(kept, pieces)
            self._drop_whole()

    def _drop_whole(self) -> None:
        """Drops the copies of small parameters that ZeRO 3 keeps whole, which hold other values than the partitions
        do or will: passes then gather the partitions again."""
        for parameter in self._parameters:
            if hasattr(parameter, "ds_tensor") and parameter.data.numel():
                parameter.partition()


def local_share(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's share of a parameter: with ZeRO 3 its partition, flat and without the padding that makes all
    ranks' partitions equally long; otherwise all of it."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.data
    partition: torch.Tensor = parameter.ds_tensor.data
    before = parameter.ds_zero_partition_rank * partition.numel()
    # DeepSpeed never writes the padding: it is whatever that memory held before, NaN included.
    return partition[: max(parameter.ds_numel - before, 0)]


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
