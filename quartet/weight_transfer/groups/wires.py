"""The wires by the names of their backends."""

import torch

from quartet.weight_transfer.groups.gloo import gloo_wire
from quartet.weight_transfer.groups.group import Wire
from quartet.weight_transfer.groups.nccl import nccl_wire


def make_wire(backend: str, host: str, device: torch.device, stall_s: float) -> Wire:
    """The wire of a member with this address and device, whose groups form within `stall_s` seconds.

    Raises:
        ValueError: the backend has no process groups, or it is NCCL without a GPU.
    """
    if backend == "gloo":
        return gloo_wire(host)
    if backend == "nccl" and device.type == "cuda":
        return nccl_wire(device, stall_s)
    if backend == "nccl":
        raise ValueError("weights.backend: nccl, but this process has no GPU")
    raise ValueError(f"weights.backend: {backend!r} is not one of gloo, nccl, ipc and cuda-ipc")
