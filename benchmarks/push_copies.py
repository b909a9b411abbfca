"""Bytes that a push copies between host and GPU, by each side, beside the least that its transport needs.

    python -m benchmarks.push_copies [--mib 64] [--bucket-mib 4]

Counted and not timed, so that it needs no GPU: weights and model are on a device that is not there
(tests/fake_device.py), and gloo carries between the memories of two such devices what NCCL would carry. Sender and
receiver are those of a push, one of each. A cell gives what was counted and the least, in copies of the weights;
`down` is to the host, `up` to the GPU. "staged" is a push whose weights are all copied before the first is sent, as
beside training; its sender copies those up again that it has not kept on the GPU.

The least follows from the promises that a push comes whole or not at all, and that newcomers get it while the learner
trains. Both need a copy of the weights. In the GPU's memory it costs nothing here; on the host it costs one copy down
and, to be loaded, one up. A learner that goes on training has room for SENT_BUCKETS on its GPU, as the sums of memory
count them; the rest of a staged push has to come back from the host. A push that is not staged copies the least while
sending keeps pace with packing.
"""

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from orchestrator.deployment.memory import SENT_BUCKETS
from quartet.config.base import MIB
from quartet.weight_transfer.groups.group import Wire
from quartet.weight_transfer.groups.wires import gloo_wire
from quartet.weight_transfer.ipc import SharedBuckets, SharedSender
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import checksum
from quartet.weight_transfer.memory.device_memory import Cuda
from quartet.weight_transfer.receiver import GroupReceiver, Joining, SharedReceiver
from quartet.weight_transfer.sender import GroupSender, Sender
from tests.fake_device import DEVICE, DOWN, UP, FakeDevice
from tests.sources import HOST
from tests.unit.fake_cuda import FakeGpu

TENSORS = 16
STALL_S = 60.0
SIDES = ("sender", "replica")
console = Console(width=110)

Figures = tuple[float, float, float, float]
"""Copies of the weights: the sender's down and up, then the replica's."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of push."""

    name: str
    backend: str
    least: Figures
    on_gpu: bool = False
    staged: bool = False


CASES = (
    Case("cuda-ipc", "cuda-ipc", (0, 0, 0, 0)),
    Case("nccl, stage: gpu", "nccl", (0, 0, 0, 0), on_gpu=True),
    Case("nccl, stage: host", "nccl", (1, 0, 1, 1)),
    Case("nccl, stage: host, staged", "nccl", (1, 1, 1, 1), staged=True),  # but for what stays on the GPU
    Case("ipc", "ipc", (1, 0, 0, 1)),
    Case("gloo", "gloo", (1, 0, 0, 1)),
)


def main(
    mib: Annotated[int, typer.Option(min=1, help="size of the weights")] = 64,
    bucket_mib: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    drawn = Table(title=f"copies of {mib} MiB, buckets of {bucket_mib} MiB", title_justify="left")
    for column in ("push", *(f"{side} {direction}" for side in SIDES for direction in ("down", "up"))):
        drawn.add_column(column)
    for case in CASES:
        counted, least = count(case, mib * MIB, bucket_mib * MIB), needed(case, mib * MIB, bucket_mib * MIB)
        drawn.add_row(case.name, *(f"{done:.2f} / {most:.2f}" for done, most in zip(counted, least, strict=True)))
    console.print(drawn)


def drawn_weights(size: int) -> dict[str, torch.Tensor]:
    """Weights of `size` bytes, on the device."""
    return {f"w{i}": torch.randn(size // 4 // TENSORS, device=DEVICE) for i in range(TENSORS)}


def needed(case: Case, size: int, bucket_bytes: int) -> Figures:
    """The least copies of `size` bytes of weights, by the sizes of their buckets."""
    down, up, *replica = case.least
    if case.staged:
        manifest = Manifest.of(drawn_weights(size), bucket_bytes)
        sizes = sorted(sum(manifest.size(index) for index in bucket) for bucket in manifest.buckets())
        up -= sum(sizes[-SENT_BUCKETS:]) / sum(sizes)
    return (down, up, *replica)  # type: ignore[return-value]


def count(case: Case, size: int, bucket_bytes: int) -> Figures:
    """Copies of `size` bytes of weights in one push, all of whose bytes were compared in the end."""
    with tempfile.TemporaryDirectory() as folder, FakeDevice().counting() as device:
        weights = drawn_weights(size)
        manifest = Manifest.of(weights, bucket_bytes)
        cuda = FakeGpu(Path(folder)).cuda
        view = cuda.view
        cuda.view = lambda *place: device.take(view(*place))
        sender, receiver = _ends(case, manifest, cuda)
        model: dict[str, torch.Tensor] = {}

        def replica() -> None:
            joining = Joining(case.backend, [[HOST, sender.rendezvous()]], 1, 2, 1, HOST, STALL_S, on_gpu=case.on_gpu)
            receiver.join(joining)
            if isinstance(receiver, SharedReceiver):
                loaded.wait()
            received.append(receiver.receive(manifest))
            for bucket, data in receiver.buckets():
                for name, tensor in manifest.cut(bucket, data.to(DEVICE, non_blocking=True)):
                    model[name] = tensor.clone()
            receiver.check()

        received: list[str] = []
        loaded = threading.Event()
        receiving = _started(device, "replica", replica)
        sender.join(1, 2)
        loading = _started(device, "sender", lambda: sender.load(weights.items(), 1))
        if case.staged or case.backend.endswith("ipc"):
            loading.join()
        loaded.set()
        with device.labelled("sender"):
            sent = checksum(sender.send(1))
        for thread in (loading, receiving):
            thread.join()
        assert received == [sent]
        assert all(device.has(model[name]) and torch.equal(model[name], weights[name]) for name in weights)
        receiver.close()
        sender.close()
    return tuple(device.copied[side, direction] / size for side in SIDES for direction in (DOWN, UP))  # type: ignore[return-value]


def _ends(case: Case, manifest: Manifest, cuda: Cuda) -> tuple[Sender, GroupReceiver | SharedReceiver]:
    """The two ends of a push, as make_sender and make_receiver make them where there is a GPU."""
    if case.backend == "ipc":
        return SharedSender.host(manifest, device=DEVICE), SharedReceiver(SharedBuckets.host)
    if case.backend == "cuda-ipc":
        return SharedSender.gpu(manifest, DEVICE, cuda=cuda), SharedReceiver(
            lambda numbers, its: SharedBuckets.gpu(numbers, its, DEVICE, cuda)
        )
    wire = gloo_wire(HOST) if case.backend == "gloo" else Wire(gloo_wire(HOST).form, DEVICE)
    sender = GroupSender(manifest, wire, host=HOST, stall_s=STALL_S, device=DEVICE, on_gpu=case.on_gpu)
    return sender, GroupReceiver(DEVICE, lambda backend, host, device, stall_s: wire)


def _started(device: FakeDevice, label: str, work: Callable[[], Any]) -> threading.Thread:
    """A thread whose copies are counted under a label."""
    thread = threading.Thread(target=work)
    with device.labelled(label):
        thread.start()
    return thread


if __name__ == "__main__":
    typer.run(main)
