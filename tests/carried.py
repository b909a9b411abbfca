"""The push by NCCL without a GPU: its own code, but gloo carries the bytes, between "devices" that are CPUs.
Benchmarks use it too."""

from typing import Any

import torch

from quartet.weight_transfer.groups.group import Wire
from quartet.weight_transfer.groups.wires import gloo_wire
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.device_memory import Cuda
from quartet.weight_transfer.place import Place, machine
from quartet.weight_transfer.receiver import GroupReceiver, Receiver, make_receiver
from quartet.weight_transfer.sender import GroupSender, Sender, make_sender


def carried_wire(backend: str, host: str, device: torch.device, stall_s: float) -> Wire:
    """A wire that reads and writes the device's memory, as NCCL's does."""
    return Wire(gloo_wire(host).form, device)


def place(backend: str, name: str) -> Place:
    """The place of a member: of cuda-ipc all share a GPU, of NCCL each has its own."""
    gpus = {"cuda-ipc": ("GPU-0",), "nccl": (f"GPU of {name}",)}
    return Place(machine(), gpus.get(backend, ()))


def sender_for(
    backend: str, manifest: Manifest, *, host: str, stall_s: float, cuda: Cuda | None = None, **share: int
) -> Sender:
    """The sender of a backend, as make_sender makes it where there is a GPU."""
    device = torch.device("cpu")
    if backend != "nccl":
        return make_sender(backend, manifest, host=host, stall_s=stall_s, cuda=cuda, **share)  # type: ignore[arg-type]
    wire, options = carried_wire(backend, host, device, stall_s), dict[str, Any](share)
    return GroupSender(manifest, wire, host=host, stall_s=stall_s, device=device, **options)


def receiver_for(backend: str, device: torch.device, cuda: Cuda | None) -> Receiver:
    """The receiver of a backend, as make_receiver makes it where there is a GPU."""
    return GroupReceiver(device, carried_wire) if backend == "nccl" else make_receiver(backend, device, cuda)
