"""Pinned host memory, which GPUs copy from and to at full speed and in parallel with other work."""

import logging
import weakref

import torch

from quartet.weight_transfer.memory.cuda_library import CudaLibrary

log = logging.getLogger("quartet")


READ_ONLY = 8
"""cudaHostRegisterReadOnly: the mapping may only be read."""


def pin(memory: torch.Tensor, owner: object, library: CudaLibrary | None = None, *, flags: int = 0) -> bool:
    """Pins memory until `owner` is freed. False if the machine does not allow it: copies are then slower.

    Torch's own pinned allocations round sizes up to a power of two, which can double the memory.

    Args:
        memory: contiguous host memory; it may be shared memory.
        owner: the object that frees the memory.
        library: CUDA's runtime; None for torch's.
        flags: READ_ONLY for memory that this process may not write to; not all GPUs can pin that.
    """
    try:
        library = library or CudaLibrary.load()
        library.call("cudaHostRegister", memory.data_ptr(), memory.nbytes, flags)
    except RuntimeError as error:
        log.warning("%d MiB of host memory are not pinned: %s", memory.nbytes >> 20, error)
        return False
    # At the process's end CUDA and the memory are freed together, so nothing has to be unpinned then.
    weakref.finalize(owner, library.call, "cudaHostUnregister", memory.data_ptr()).atexit = False
    return True
