"""A count of the operations for which a GPU's stream would have to be waited for, taken on a CPU.

Copies to the `meta` device stand for those to a GPU: they are the same calls of torch's.
"""

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


COPIES = {"_to_copy", "copy_"}
"""Operators that copy from the host; to a GPU without waiting only from pinned memory, and if told so."""


class Copies:
    """Counts the bytes that are copied to the device."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of all copies."""
        self.pinned: list[torch.Tensor] = []
        """Tensors that were pinned."""

    def waits(self, source: torch.Tensor, non_blocking: bool) -> bool:
        """Counts a copy of `source` to the device; True if the host has to wait for it."""
        self.bytes += source.numel() * source.element_size()
        return not (non_blocking and any(source is pinned for pinned in self.pinned))


class _Operators(TorchDispatchMode):
    def __init__(self, counted: Counter[str], copies: Copies) -> None:
        super().__init__()
        self._counted, self._copies = counted, copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name in ("index", "index_put", "index_put_") and _by_mask(args[1])):
            self._counted[name] += 1
        given = func(*args, **(kwargs or {}))
        # Copied from the source itself, or for `copy_` from the second argument.
        source = args[name == "copy_"] if name in COPIES else None
        if isinstance(source, torch.Tensor) and source.is_cpu and not given.is_cpu:
            non_blocking = bool((kwargs or {}).get("non_blocking") or args[2:3] == (True,))
            self._counted["to device"] += self._copies.waits(source, non_blocking)
        return given


class _Functions(TorchFunctionMode):
    def __init__(self, counted: Counter[str], copies: Copies) -> None:
        super().__init__()
        self._counted, self._copies = counted, copies

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FUNCTIONS:
            self._counted[func.__name__] += 1
        if func is torch.Tensor.pin_memory:  # which needs a GPU
            self._copies.pinned.append(args[0].clone())
            return self._copies.pinned[-1]
        return func(*args, **(kwargs or {}))


@contextmanager
def device_waits(copies: Copies | None = None) -> Iterator[Counter[str]]:
    """Context that counts them, by name, in forward and backward passes; and the bytes copied to the device."""
    counted: Counter[str] = Counter()
    copies = copies or Copies()
    with _Functions(counted, copies), _Operators(counted, copies):
        yield counted
    counted += Counter()  # leaves out what was counted as 0


def _by_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)
