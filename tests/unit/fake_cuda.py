"""CUDA's runtime as a library of C functions, with files in a folder in the place of a GPU's memory, so that several
processes can share it."""

import ctypes
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from services.common.weight_transfer.memory.device_memory import HANDLE_BYTES, Cuda, Handle

NOT_MAPPED, OUT_OF_MEMORY = 205, 2
FOLDER = "FAKE_GPU"
LARGEST = 1 << 28
Pointer = ctypes.c_void_p


class FakeGpu:
    """One process's view of the memory in `folder`, an empty folder at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[int, tuple[bytes, Any]] = {}
        self.calls: list[str] = []
        to_pointer, whole = ctypes.POINTER(Pointer), ctypes.c_size_t
        # Real C functions: a wrong type of an argument fails here as it would there.
        functions = {
            "cudaMalloc": ctypes.CFUNCTYPE(ctypes.c_int, to_pointer, whole)(self._allocate),
            "cudaFree": ctypes.CFUNCTYPE(ctypes.c_int, Pointer)(self._free),
            "cudaIpcGetMemHandle": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Handle), Pointer)(self._handle),
            "cudaIpcOpenMemHandle": ctypes.CFUNCTYPE(ctypes.c_int, to_pointer, Handle, ctypes.c_uint)(self._open),
            "cudaIpcCloseMemHandle": ctypes.CFUNCTYPE(ctypes.c_int, Pointer)(self._close),
        }
        self.cuda = Cuda(SimpleNamespace(**functions), view)

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


def view(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The memory as a tensor."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
