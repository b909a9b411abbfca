"""CUDA's runtime as a library of C functions, with files in a folder in the place of a GPU's memory, so that several
processes can share it."""

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from quartet.weight_transfer.memory.cuda_library import HANDLE_BYTES, CudaLibrary, Handle
from quartet.weight_transfer.memory.device_memory import Cuda

NOT_MAPPED, OUT_OF_MEMORY = 205, 2
FOLDER = "FAKE_GPU"
LARGEST = 1 << 28
Pointer, Size, Flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint


class FakeGpu:
    """One process's view of the memory in `folder`, an empty folder at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[int, tuple[bytes, Any]] = {}
        self.calls: list[str] = []
        self.pinned: dict[int, tuple[int, int]] = {}
        """Address of host memory -> its size and flags."""
        self.refused = 0
        """Error with which pinning fails; 0 for none."""
        self.last_error = 0
        """CUDA's runtime keeps an error until it is asked for the last one, which torch does after a kernel."""
        to_pointer = ctypes.POINTER(Pointer)
        # Real C functions: a wrong type of an argument fails here as it would there.
        functions: dict[str, tuple[list[Any], Callable[..., int]]] = {
            "cudaMalloc": ([to_pointer, Size], self._allocate),
            "cudaFree": ([Pointer], self._free),
            "cudaIpcGetMemHandle": ([ctypes.POINTER(Handle), Pointer], self._handle),
            "cudaIpcOpenMemHandle": ([to_pointer, Handle, Flags], self._open),
            "cudaIpcCloseMemHandle": ([Pointer], self._close),
            "cudaHostRegister": ([Pointer, Size, Flags], self._pin),
            "cudaHostUnregister": ([Pointer], self._unpin),
        }
        made = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._keeping_errors(function))
            for name, (types, function) in functions.items()
        }
        last = ctypes.CFUNCTYPE(ctypes.c_int)(self._forget_error)
        self.library = CudaLibrary(SimpleNamespace(**made, cudaGetLastError=last))
        self.cuda = Cuda(self.library, view)

    def _keeping_errors(self, function: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            error = function(*arguments)
            self.last_error = error or self.last_error
            return error

        return called

    def _forget_error(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    @classmethod
    def of(cls, backend: str) -> Cuda | None:
        """The GPU in the folder that the environment names; None for other backends, or where no folder is named."""
        folder = os.environ.get(FOLDER)
        return cls(Path(folder)).cuda if backend == "cuda-ipc" and folder else None

    @property
    def mapped(self) -> int:
        """Number of allocations that this process sees."""
        return len(self._mapped)

    def _allocate(self, address: Any, size: int) -> int:
        self.calls.append("malloc")
        if size > LARGEST:
            return OUT_OF_MEMORY
        name = os.urandom(8).hex().encode()
        (self._folder / name.decode()).write_bytes(bytes(size))
        address[0] = self._map(name)
        return 0

    def _handle(self, handle: Any, address: int) -> int:
        self.calls.append("handle")
        ctypes.memmove(handle, self._mapped[address][0].ljust(HANDLE_BYTES, b"\xff"), HANDLE_BYTES)
        return 0

    def _open(self, address: Any, handle: Handle, flags: int) -> int:
        self.calls.append("open")
        name = bytes(handle).rstrip(b"\xff")
        if flags != 1 or not (self._folder / name.decode()).exists():
            return NOT_MAPPED
        address[0] = self._map(name)
        return 0

    def _map(self, name: bytes) -> int:
        with (self._folder / name.decode()).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        first = ctypes.c_char.from_buffer(memory)
        self._mapped[ctypes.addressof(first)] = name, first
        return ctypes.addressof(first)

    def _free(self, address: int) -> int:
        self.calls.append("free")
        (self._folder / self._mapped.pop(address)[0].decode()).unlink()
        return 0

    def _close(self, address: int) -> int:
        self.calls.append("close")
        del self._mapped[address]
        return 0

    def _pin(self, address: int, size: int, flags: int) -> int:
        if not self.refused:
            self.pinned[address] = size, flags
        return self.refused

    def _unpin(self, address: int) -> int:
        del self.pinned[address]
        return 0


def view(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The memory as a tensor."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
