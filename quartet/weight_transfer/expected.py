"""The weights that a model needs from a push, compared with the manifest before the first byte is sent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quartet.weight_transfer.manifest import Manifest
from quartet.wire.errors import InvalidArgument

SHOWN = 3
"""Most names of differing weights in an error message."""


@dataclass(frozen=True, slots=True)
class _Weight:
    shape: tuple[int, ...]
    dtypes: frozenset[str]


class ExpectedWeights:
    """Names, shapes and dtypes of a model's weights in transformers' form. From these an engine makes its own
    weights, which may be fused, divided among workers or packed."""

    def __init__(self, model: nn.Module, dtype: str, adapters: Mapping[str, torch.Tensor] | None = None) -> None:
        """
        Args:
            model: the learner's model; tensors without data (`meta`) suffice.
            dtype: dtype of the learner and the engine. A weight that `model` has in another dtype may come in either.
            adapters: those that the learner adds to the model, if pushes bring nothing else.
        """
        # Tied weights have several names. The names after the first are optional.
        everything = dict(model.named_parameters(remove_duplicate=False)) if adapters is None else adapters
        needed = model.named_parameters() if adapters is None else adapters.items()
        self._known = {name: _described(weight, dtype) for name, weight in everything.items()}
        self._needed = {name: self._known[name] for name, _ in needed}
        self._what = "weights" if adapters is None else "adapters"

    def check(self, manifest: Manifest) -> None:
        """Raises InvalidArgument, which names some differing weights, unless the manifest holds all weights that the
        model needs, with their shapes and dtypes, and no others."""
        pushed = {
            name: (tuple(shape), dtype)
            for name, shape, dtype in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True)
        }
        wrong = [
            *_some("the push lacks", (name for name in self._needed if name not in pushed)),
            *_some("this replica's model lacks", (name for name in pushed if name not in self._known)),
            *_some("sizes differ:", self._differences(pushed)),
        ]
        if wrong:
            raise InvalidArgument(f"manifest: not the {self._what} of this replica's model: {'; '.join(wrong)}")

    def _differences(self, pushed: dict[str, tuple[tuple[int, ...], str]]) -> Iterable[str]:
        for name, (shape, dtype) in pushed.items():
            if (mine := self._known.get(name)) and (shape != mine.shape or dtype not in mine.dtypes):
                yield f"{name} {dtype}{list(shape)} pushed, {'/'.join(sorted(mine.dtypes))}{list(mine.shape)} here"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights that a push has to bring."""
        return {name: weight.shape for name, weight in self._needed.items()}

    @property
    def longest_manifest(self) -> int:
        """Size limit, in bytes, of a packed manifest of this model."""
        return 1024 + sum(2 * len(name) + 64 + 16 * len(weight.shape) for name, weight in self._known.items())


def _described(weight: torch.Tensor, dtype: str) -> _Weight:
    return _Weight(tuple(weight.shape), frozenset({dtype, str(weight.dtype).removeprefix("torch.")}))


def _some(what: str, names: Iterable[str]) -> list[str]:
    """The first few names, and the number of further ones."""
    every = list(names)
    if not every:
        return []
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return [f"{what} {', '.join(every[:SHOWN])}{more}"]
