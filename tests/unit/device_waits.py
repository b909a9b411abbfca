"""A count of the operations for which a GPU's stream would have to be waited for, taken on a CPU."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
"""Operators whose result, or its shape, the host needs."""
FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.tensor}
"""Functions that read a tensor, or copy numbers of the host to one in the order of the stream, without an operator of
their own on a CPU."""


class _Operators(TorchDispatchMode):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name in ("index", "index_put", "index_put_") and _by_mask(args[1])):
            self._counted[name] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FUNCTIONS:
            self._counted[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def device_waits() -> Iterator[Counter[str]]:
    """Context that counts them, by name, in forward and backward passes."""
    counted: Counter[str] = Counter()
    with _Functions(counted), _Operators(counted):
        yield counted


def _by_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)
