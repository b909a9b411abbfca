"""Push time against a bare gloo broadcast of the same bytes, and against a push layer by layer, in one run.

    python -m benchmarks.weights [--mib 256] [--replicas 1,2,4] [--rounds 7] [--backend gloo|ipc]

Replicas are processes with the real part of a replica in a push (services/rollout/weights.py) and a dictionary of
tensors in place of a vLLM model; the control calls go over pipes. All sides take turns, so that a machine that
changes speed changes all of them.

- `bare`: one broadcast of all bytes at once, to as many processes, from memory that is there already.
- `transfer`: the part of a push in which bytes move: every bucket broadcast, hashed and compared.
- `push`: all of it: who is there, prepare, gathering and packing the weights, transfer, and loading them.
- `join`: a newcomer brought to the weights in between, from its application to its being ready to serve them.
- `layers`: one call and one broadcast for each of 300 tensors, as peers do it, without packing or loading.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from orchestrator.config import WeightsConfig
from orchestrator.weights import WeightPusher
from protos import rollout_pb2 as pb
from services.common.weight_transfer.gloo import GlooGroup, reach_store, serve_store
from services.common.weight_transfer.manifest import MIB, Manifest
from services.common.weight_transfer.registry import Admission
from tests.members import Fleet
from tests.sources import HOST, LocalSource

STALL_S = 60.0
TENSORS = 300
console = Console()


def main(
    mib: Annotated[int, typer.Option(min=1)] = 256,
    replicas: Annotated[str, typer.Option(help="numbers of replicas, such as 1,2,4")] = "1,2,4",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    bucket_mib: Annotated[int, typer.Option(min=1)] = 64,
    backend: Annotated[str, typer.Option(help="gloo, or ipc: memory that is shared")] = "gloo",
) -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    title = f"{mib} MiB in {TENSORS} tensors, buckets of {bucket_mib} MiB, {backend}"
    drawn = Table(title=title, title_justify="left")
    for column in (
        "replicas",
        "bare s",
        "transfer s",
        "push s",
        "layers s",
        "join s",
        "transfer/bare",
        "push/bare",
        "layers/push",
        "join/push",
    ):
        drawn.add_column(column, justify="right")
    for count in [int(number) for number in replicas.split(",")]:
        drawn.add_row(str(count), *asyncio.run(_measure(mib, count, rounds, bucket_mib, backend)))
    console.print(drawn)


async def _measure(mib: int, replicas: int, rounds: int, bucket_mib: int, backend: str) -> list[str]:
    """The cells of one row, from the medians of the rounds."""
    weights = _weights(mib)
    fleet, others, newcomers = Fleet(backend), Fleet(), Fleet(backend)
    for each in (fleet, others):
        await each.add(*(f"replica{number}" for number in range(replicas)))
    await newcomers.add("newcomer")
    source = LocalSource(weights, bucket_bytes=bucket_mib * MIB, stall_s=STALL_S, backend=backend)
    config = WeightsConfig(timeout_s=600, stall_s=STALL_S, control_s=30, bucket_mib=bucket_mib)
    pusher = WeightPusher(fleet, source, backend, config)  # type: ignore[arg-type]
    bare = Bare(mib, replicas)
    layers = Layers(others, list(others.members), weights, 1_000_000)
    sides: dict[str, Callable[[], Awaitable[float]]] = {
        "bare": bare.broadcast,
        "push": lambda: _pushed(pusher),
        "layers": layers.push,
        "join": lambda: _joined(pusher, newcomers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*sides, "transfer")}
    try:
        for round_ in range(-2, rounds):
            for name, side in sides.items():
                took = await side()
                if round_ >= 0:
                    seconds[name].append(took)
            if round_ >= 0:
                seconds["transfer"].append(source.transfer_s)
    finally:
        bare.end()
        await fleet.end()
        await others.end()
        await newcomers.end()
    found = {name: median(values) for name, values in seconds.items()}
    times = [f"{found[name]:.3f}" for name in ("bare", "transfer", "push", "layers", "join")]
    ratios = [("transfer", "bare"), ("push", "bare"), ("layers", "push"), ("join", "push")]
    return times + [f"{found[over] / found[under]:.2f}" for over, under in ratios]


def _weights(mib: int) -> dict[str, torch.Tensor]:
    numbers = mib * MIB // 4 // TENSORS
    return {f"layers.{index}.weight": torch.randn(numbers) for index in range(TENSORS)}


async def _pushed(pusher: WeightPusher) -> float:
    report = await pusher.push(1)
    assert report.attempts == 1
    return report.seconds


async def _joined(pusher: WeightPusher, newcomers: Fleet) -> float:
    """Seconds of an admission, carried out as a replica does it (services/rollout/joining.py)."""
    [member] = newcomers.members.values()
    receiving: list[asyncio.Task[None]] = []

    async def receive(admission: Admission) -> None:
        for name, phase in (
            ("prepare", pb.Prepare.FromString(admission.prepare)),
            ("transfer", pb.Transfer.FromString(admission.transfer)),
            ("commit", pb.Commit.FromString(admission.commit)),
        ):
            asked = pb.WeightPhase(timeout_s=60, **{name: phase})  # type: ignore[arg-type]
            assert pb.WeightReport.FromString(await member.carry_out(asked)).ok

    async def deliver(admissions: dict[str, Admission | None]) -> None:
        admission = admissions[member.name]
        assert admission is not None
        receiving.append(asyncio.create_task(receive(admission)))

    began = time.perf_counter()
    await pusher.admit({member.name: 1}, deliver)
    await receiving[0]
    return time.perf_counter() - began


class Layers:
    """One Transfer call and one broadcast for each tensor."""

    def __init__(self, rollout: Any, members: list[str], weights: dict[str, torch.Tensor], epoch: int) -> None:
        self._rollout = rollout
        self._members = members
        self._store = serve_store(HOST, STALL_S)
        self._tensors = weights
        self._epoch = epoch

    async def push(self) -> float:
        """Seconds for the transfers alone, after a group was formed."""
        members = self._members
        self._epoch += 1
        rendezvous = [pb.Rendezvous(address=HOST, port=self._store.port)]
        ranks = {name: 1 + number for number, name in enumerate(members)}
        world = 1 + len(members)
        prepare = pb.Prepare(
            epoch=self._epoch, senders=rendezvous, world_size=world, ranks=ranks, in_flight="keep", stall_s=STALL_S
        )
        joining = asyncio.create_task(self._rollout.update_weights(60, members=members, prepare=prepare))
        await asyncio.sleep(0)
        group = await asyncio.to_thread(
            GlooGroup, self._store, host=HOST, rank=0, world_size=world, epoch=self._epoch, timeout_s=STALL_S
        )
        assert all(report.ok for report in await joining)
        began = time.perf_counter()
        for name, tensor in self._tensors.items():
            manifest = Manifest.of({name: tensor}, 1)
            transfer = pb.Transfer(epoch=self._epoch, manifest=manifest.pack())
            receiving = asyncio.create_task(self._rollout.update_weights(60, members=members, transfer=transfer))
            await asyncio.to_thread(group.broadcast, tensor.view(torch.uint8))
            assert all(report.ok for report in await receiving)
        took = time.perf_counter() - began
        await self._rollout.update_weights(60, members=members, abort=pb.Abort(epoch=self._epoch))
        group.close()
        return took


@dataclass
class _Receiver:
    pipe: Connection
    process: Any


class Bare:
    """A gloo group and one buffer in each process, both made once."""

    def __init__(self, mib: int, replicas: int) -> None:
        self._store = serve_store(HOST, STALL_S)
        spawn = multiprocessing.get_context("spawn")
        self._receivers: list[_Receiver] = []
        for rank in range(1, 1 + replicas):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_receive, args=(theirs, self._store.port, rank, 1 + replicas, mib), daemon=True
            )
            process.start()
            self._receivers.append(_Receiver(mine, process))
        self._group = GlooGroup(self._store, host=HOST, rank=0, world_size=1 + replicas, epoch=0, timeout_s=STALL_S)
        self._data = torch.ones(mib * MIB, dtype=torch.uint8)

    async def broadcast(self) -> float:
        """Seconds until every receiver has everything."""
        for receiver in self._receivers:
            receiver.pipe.send("receive")
        began = time.perf_counter()
        self._group.broadcast(self._data)
        for receiver in self._receivers:
            receiver.pipe.recv()
        return time.perf_counter() - began

    def end(self) -> None:
        for receiver in self._receivers:
            receiver.pipe.send("end")
            receiver.process.join()
        self._group.close()


def _receive(pipe: Connection, port: int, rank: int, world_size: int, mib: int) -> None:
    torch.set_num_threads(1)
    data = torch.ones(mib * MIB, dtype=torch.uint8)
    store = reach_store(HOST, port, STALL_S)
    group = GlooGroup(store, host=HOST, rank=rank, world_size=world_size, epoch=0, timeout_s=STALL_S)
    while pipe.recv() == "receive":
        group.broadcast(data)
        pipe.send("received")


if __name__ == "__main__":
    typer.run(main)
