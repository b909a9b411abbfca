"""CUDA's runtime as a library of C functions."""

import ctypes
from typing import Any

import torch

HANDLE_BYTES = 64
"""Size of a handle, CUDA_IPC_HANDLE_SIZE."""


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


_POINTER, _SIZE, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_TYPES: dict[str, list[Any]] = {
    "cudaMalloc": [ctypes.POINTER(_POINTER), _SIZE],
    "cudaFree": [_POINTER],
    "cudaIpcGetMemHandle": [ctypes.POINTER(Handle), _POINTER],
    "cudaIpcOpenMemHandle": [ctypes.POINTER(_POINTER), Handle, _FLAGS],
    "cudaIpcCloseMemHandle": [_POINTER],
    "cudaHostRegister": [_POINTER, _SIZE, _FLAGS],
    "cudaHostUnregister": [_POINTER],
    "cudaGetLastError": [],
}
"""Function -> types of its arguments. All return an error code."""


class CudaLibrary:
    """The functions of CUDA's runtime that torch does not offer, or whose errors it would not forget."""

    def __init__(self, library: Any) -> None:
        """`library` has the functions by their names in C."""
        self._functions: dict[str, Any] = {}
        for name, types in _TYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
            self._functions[name] = function

    @classmethod
    def load(cls) -> "CudaLibrary":
        """The library that torch has loaded; RuntimeError if there is none."""
        name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
        try:
            return cls(ctypes.CDLL(name))
        except OSError as error:
            raise RuntimeError(f"CUDA's runtime is missing: {error}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        CUDA also keeps an error as the last one of the thread, and torch asks for it after each of its kernels: an
        error that is handled would end a later one that has nothing to do with it. So it is taken away here.

        Raises:
            RuntimeError: the function returned an error.
        """
        if error := self._functions[name](*arguments):
            self._functions["cudaGetLastError"]()
            raise RuntimeError(f"{name} failed: CUDA error {error}")
