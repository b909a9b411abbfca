"""GPU memory that another process of the same machine can open, through CUDA's own inter-process handles."""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from quartet.weight_transfer.memory.cuda_library import CudaLibrary, Handle

LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess, the only flag that CUDA allows."""

View = Callable[[int, int, torch.device], torch.Tensor]
"""Makes a uint8 tensor [bytes] of the memory at an address, without a copy."""


class Cuda:
    """Memory that processes share, by CUDA's runtime. Each function raises RuntimeError if it fails."""

    def __init__(self, library: CudaLibrary, view: View) -> None:
        self._library = library
        self.view = view

    def allocate(self, size: int) -> int:
        """The address of `size` new bytes on the current GPU."""
        address = ctypes.c_void_p()
        self._library.call("cudaMalloc", ctypes.byref(address), size)
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Frees what `allocate` returned."""
        self._library.call("cudaFree", address)

    def handle(self, address: int) -> bytes:
        """The handle by which another process opens this allocation."""
        handle = Handle()
        self._library.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address in this process of another process's allocation."""
        address = ctypes.c_void_p()
        self._library.call(
            "cudaIpcOpenMemHandle", ctypes.byref(address), Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS
        )
        return int(address.value or 0)

    def close(self, address: int) -> None:
        """Gives back what `open` returned."""
        self._library.call("cudaIpcCloseMemHandle", address)


def cuda_runtime() -> Cuda:
    """The runtime that torch has loaded. RuntimeError if there is none."""
    return Cuda(CudaLibrary.load(), _on_gpu)


def _on_gpu(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The memory as torch sees it, by the interface that array libraries share."""
    array = type("Array", (), {})()
    array.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(array, device=device)


class DeviceMemory:
    """An allocation on a GPU: this process's own, or another's.

    It is not torch's memory, whose allocator would have to keep every block until the last reader is done with it.
    """

    def __init__(
        self, address: int, size: int, device: torch.device, cuda: Cuda, release: Callable[[int], None]
    ) -> None:
        """Wraps an address; use `allocate` or `open`."""
        self._address, self._release = address, release
        self._handle = cuda.handle
        self.data = cuda.view(address, size, device)
        """The bytes: uint8, [size]."""

    @classmethod
    def allocate(cls, size: int, device: torch.device, cuda: Cuda | None = None) -> "DeviceMemory":
        """New memory on `device`; RuntimeError if there is too little."""
        cuda = cuda or cuda_runtime()
        with _current(device):
            return cls(cuda.allocate(size), size, device, cuda, cuda.free)

    @classmethod
    def open(cls, handle: bytes, size: int, device: torch.device, cuda: Cuda | None = None) -> "DeviceMemory":
        """Another process's memory, of which `device` is the same GPU; RuntimeError if it is gone."""
        cuda = cuda or cuda_runtime()
        with _current(device):
            return cls(cuda.open(handle), size, device, cuda, cuda.close)

    def handle(self) -> bytes:
        """The handle of memory that this process allocated."""
        return self._handle(self._address)

    def close(self) -> None:
        """Gives the memory back; `data` is empty afterwards. Does nothing the second time."""
        address, self._address = self._address, 0
        if address:
            self.data = torch.empty(0, dtype=torch.uint8)
            self._release(address)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a GPU is the current one, on which CUDA's functions work."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
