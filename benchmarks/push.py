"""Push time against a bare gloo broadcast of the same bytes, and against a push layer by layer, in one run.

    python -m benchmarks.push [--mib 256] [--replicas 1,2,4] [--rounds 7] [--backend gloo|ipc|cuda-ipc]
                                 [--device cpu|cuda]

Replicas are processes with the real part of a replica in a push (services/rollout/member.py) and a dictionary of
tensors in place of a vLLM model; the control calls go over pipes. All sides take turns, so that a machine that
changes speed changes all of them. `bare` and `layers` are gloo's and in host memory whatever is measured beside
them.

- `bare`: one broadcast of all bytes at once, to as many processes, from memory that is there already.
- `transfer`: the part of a push in which bytes move: every bucket broadcast, hashed and compared.
- `push`: all of it: who is there, prepare, gathering and packing the weights, transfer, and loading them.
- `join`: a newcomer brought to the weights in between, from its application to its being ready to serve them.
- `proof`: what scoring a few fixed sequences on both sides, by a model of as many bytes, adds to a push of which it
  is the proof.
- `layers`: one call and one broadcast for each of 300 tensors, as peers do it, without packing or loading.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import check_known, numbers
from benchmarks.figures import keep
from orchestrator.config.weights import WeightsConfig
from orchestrator.push.prover import Prover
from orchestrator.push.pusher import WeightPusher
from orchestrator.push.tolerance import Tolerance
from protos import rollout_pb2 as pb
from quartet.config.base import MIB
from quartet.ranks.rendezvous import reach_store, serve_store
from quartet.weight_transfer.groups.group import Group
from quartet.weight_transfer.groups.wires import gloo_wire
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.meeting import open_store
from quartet.weight_transfer.place import Place, machine
from quartet.weight_transfer.probe import probe_sequences
from quartet.weight_transfer.registry import Applicant, Ticket
from quartet.wire.codec import Floats, Ints
from tests.members import LEASE, Fleet
from tests.newcomers import nobody_looks
from tests.sized import MAX_LENGTH, VOCABULARY, score
from tests.sources import HOST, LocalSource

TENSORS = 300
BACKENDS = ("gloo", "ipc", "cuda-ipc")
STALL_S = 60.0
console = Console()


def main(
    mib: Annotated[int, typer.Option(min=1)] = 256,
    replicas: Annotated[str, typer.Option(help="numbers of replicas, such as 1,2,4")] = "1,2,4",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    bucket_mib: Annotated[int, typer.Option(min=1)] = 64,
    backend: Annotated[str, typer.Option(help="gloo, or memory that is shared: ipc, cuda-ipc")] = "gloo",
    device: Annotated[str, typer.Option(help="where the weights are, and go to")] = "cpu",
) -> None:
    """Runs the benchmark and prints its results."""
    counts = numbers(replicas, "--replicas", least=1)
    check_known([backend], BACKENDS, "--backend")
    torch.set_num_threads(1)
    title = f"{mib} MiB in {TENSORS} tensors, buckets of {bucket_mib} MiB, {backend}, {device}"
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
        "proof/push",
    ):
        drawn.add_column(column, justify="right")
    for count in counts:
        medians = asyncio.run(_measure(mib, count, rounds, bucket_mib, backend, device))
        keep(f"{backend}, {count} {'replica' if count == 1 else 'replicas'}", medians)
        drawn.add_row(str(count), *_cells(medians))
    console.print(drawn)


async def _measure(
    mib: int, replicas: int, rounds: int, bucket_mib: int, backend: str, device: str
) -> dict[str, float]:
    """Median seconds of each side over the rounds."""
    weights = {name: tensor.to(device) for name, tensor in _weights(mib).items()}
    fleet, others, newcomers = Fleet(backend, device), Fleet(), Fleet(backend, device)
    for each in (fleet, others):
        await each.add(*(f"replica{number}" for number in range(replicas)))
    await newcomers.add("newcomer")
    source = LocalSource(weights, bucket_bytes=bucket_mib * MIB, stall_s=STALL_S, backend=backend)
    config = WeightsConfig(timeout_s=600, stall_s=STALL_S, control_s=30, bucket_mib=bucket_mib)
    pusher = WeightPusher(fleet, source, backend, config)  # type: ignore[arg-type]
    bare = Bare(mib, replicas)
    layers = Layers(others, list(others.members), _weights(mib), 1_000_000)
    prover = Prover(_Learner(mib), probe_sequences(VOCABULARY, MAX_LENGTH), Tolerance(1e-3, 1e-3), every=1)
    sides: dict[str, Callable[[], Awaitable[float]]] = {
        "bare": bare.broadcast,
        "push": lambda: _pushed(pusher),
        "layers": layers.push,
        "join": lambda: _joined(pusher, newcomers),
        "proved": lambda: _proved(pusher, prover),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*sides, "transfer")}
    try:
        for round_ in range(-2, rounds):
            for name, side in sides.items():
                took = await side()
                if round_ >= 0:
                    seconds[name].append(took)
                    if name == "push":  # `proved` is one too
                        seconds["transfer"].append(source.transfer_s)
    finally:
        bare.end()
        await fleet.end()
        await others.end()
        await newcomers.end()
    return {f"{name}_s": median(values) for name, values in seconds.items()}


def _cells(seconds: dict[str, float]) -> list[str]:
    """The cells of one row."""
    medians = {name.removesuffix("_s"): took for name, took in seconds.items()}
    times = [f"{medians[name]:.3f}" for name in ("bare", "transfer", "push", "layers", "join")]
    ratios = [("transfer", "bare"), ("push", "bare"), ("layers", "push"), ("join", "push")]
    proof = medians["proved"] / medians["push"] - 1
    return [*times, *(f"{medians[over] / medians[under]:.2f}" for over, under in ratios), f"{proof:.2f}"]


def _weights(mib: int) -> dict[str, torch.Tensor]:
    numbers = mib * MIB // 4 // TENSORS
    return {f"layers.{index}.weight": torch.randn(numbers) for index in range(TENSORS)}


async def _pushed(pusher: WeightPusher) -> float:
    report = await pusher.push(1)
    assert report.attempts == 1
    return report.seconds


async def _proved(pusher: WeightPusher, prover: Prover) -> float:
    """Seconds of a push with this prover; the group stays that of the pushes without one."""
    pusher._prover = prover
    try:
        began = time.perf_counter()
        await pusher.push(1)
        return time.perf_counter() - began
    finally:
        pusher._prover = None


class _Learner:
    """Scores by a model of the size of what is pushed."""

    def __init__(self, mib: int) -> None:
        self._mib = mib

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        return await asyncio.to_thread(score, self._mib, sequences)


async def _joined(pusher: WeightPusher, newcomers: Fleet) -> float:
    """Seconds until a newcomer has joined, carried out as a replica does it (services/rollout/newcomer.py)."""
    [member] = newcomers.members.values()
    receiving: list[asyncio.Task[None]] = []

    async def receive(ticket: Ticket) -> None:
        for name, phase in (
            ("prepare", pb.Prepare.FromString(ticket.prepare)),
            ("transfer", pb.Transfer.FromString(ticket.transfer)),
            ("commit", pb.Commit.FromString(ticket.commit)),
        ):
            asked = pb.WeightPhase(timeout_s=60, lease=LEASE, **{name: phase})  # type: ignore[arg-type]
            assert pb.WeightReport.FromString(await member.carry_out(asked)).ok

    async def deliver(tickets: dict[str, Ticket | None]) -> None:
        ticket = tickets[member.name]
        assert ticket is not None
        receiving.append(asyncio.create_task(receive(ticket)))

    began = time.perf_counter()
    await pusher.add_newcomers({member.name: Applicant(1, Place(machine(), ("GPU-0",)))}, deliver, nobody_looks)
    await receiving[0]
    return time.perf_counter() - began


class Layers:
    """One Transfer call and one broadcast for each tensor."""

    def __init__(self, rollout: Any, members: list[str], weights: dict[str, torch.Tensor], membership: int) -> None:
        self._rollout = rollout
        self._members = members
        self._store, self._number = open_store(HOST, STALL_S)
        self._tensors = weights
        self._membership = membership

    async def push(self) -> float:
        """Seconds for the transfers alone, after a group was formed."""
        members = self._members
        self._membership += 1
        rendezvous = [pb.Rendezvous(address=HOST, port=self._number)]
        ranks = {name: 1 + number for number, name in enumerate(members)}
        world = 1 + len(members)
        prepare = pb.Prepare(
            membership=self._membership,
            senders=rendezvous,
            world_size=world,
            ranks=ranks,
            in_flight="keep",
            stall_s=STALL_S,
            manifest=Manifest.of(self._tensors, 1).pack(),
        )
        prepare.backend = "gloo"
        joining = asyncio.create_task(self._rollout.update_weights(60, members=members, prepare=prepare))
        await asyncio.sleep(0)
        group = await asyncio.to_thread(
            Group,
            self._store,
            gloo_wire(HOST),
            rank=0,
            world_size=world,
            membership=self._membership,
            timeout_s=STALL_S,
        )
        assert all(report.ok for report in await joining)
        began = time.perf_counter()
        for name, tensor in self._tensors.items():
            manifest = Manifest.of({name: tensor}, 1)
            transfer = pb.Transfer(membership=self._membership, manifest=manifest.pack())
            receiving = asyncio.create_task(self._rollout.update_weights(60, members=members, transfer=transfer))
            await asyncio.to_thread(group.broadcast, tensor.view(torch.uint8))
            assert all(report.ok for report in await receiving)
        took = time.perf_counter() - began
        await self._rollout.update_weights(60, members=members, abort=pb.Abort(membership=self._membership))
        group.close()
        return took


class Bare:
    """A gloo broadcast of bytes that are in memory already, the least that a push between processes can take. The
    group and one buffer in each process are made once."""

    def __init__(self, mib: int, replicas: int) -> None:
        self._store = serve_store(HOST, STALL_S)
        spawn = multiprocessing.get_context("spawn")
        self._receivers: list[tuple[Connection, Any]] = []
        for rank in range(1, 1 + replicas):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_receive, args=(theirs, self._store.port, rank, 1 + replicas, mib), daemon=True
            )
            process.start()
            theirs.close()  # so that the death of its process is noticed
            self._receivers.append((mine, process))
        for pipe, _ in self._receivers:
            pipe.recv()  # to start takes as long as imports take, which the group's deadline says nothing about
        self._group = Group(
            self._store, gloo_wire(HOST), rank=0, world_size=1 + replicas, membership=0, timeout_s=STALL_S
        )
        self._data = torch.ones(mib * MIB, dtype=torch.uint8)

    async def broadcast(self) -> float:
        """Seconds until every receiver has everything."""
        for pipe, _ in self._receivers:
            pipe.send("receive")
        began = time.perf_counter()
        self._group.broadcast(self._data)
        for pipe, _ in self._receivers:
            pipe.recv()
        return time.perf_counter() - began

    def end(self) -> None:
        """Ends the processes."""
        for pipe, process in self._receivers:
            pipe.send("end")
            process.join()
        self._group.close()


def _receive(pipe: Connection, port: int, rank: int, world_size: int, mib: int) -> None:
    torch.set_num_threads(1)
    data = torch.ones(mib * MIB, dtype=torch.uint8)
    store = reach_store(HOST, port, STALL_S)
    pipe.send("ready")
    group = Group(store, gloo_wire(HOST), rank=rank, world_size=world_size, membership=0, timeout_s=STALL_S)
    while pipe.recv() == "receive":
        group.broadcast(data)
        pipe.send("received")


if __name__ == "__main__":
    typer.run(main)
