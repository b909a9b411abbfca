"""Counts the bytes that tensors hold, as an allocator of GPU memory would, on a CPU."""

import gc
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of the storages of all tensors that are there when it is made, and of those made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are held now."""
        self._known: set[int] = set()
        self.peak = 0
        """Most bytes that were held at any time since it was made, or since `restart`."""
        gc.collect()
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor):
                self._hold(one)

    def _hold(self, tensor: torch.Tensor) -> None:
        # A compiler's stand-ins for tensors hold no bytes, and their sizes may be symbols.
        if isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor):
            return
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage._cdata
        if size and key not in self._known and storage.device.type != "meta":
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def restart(self) -> None:
        """Forgets the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._hold(leaf)
        return made
