"""The NCCL group of a push, between two processes on one GPU: right bytes, and what happens when a member is lost.

    python -m benchmarks.gpu.group [--device cuda] [--mib 256] [--stall-s 3]

NCCL refuses two ranks on a GPU. Each process here says that it is on a host of its own (NCCL_HOSTID), so that they
speak through sockets: what is seen of right and wrong holds, the speed is that of a loopback. With `--device cpu`
gloo carries the bytes through the same code.
"""

import hashlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu.results import Cell, Results
from quartet.ranks.rendezvous import reach_store, serve_store
from quartet.weight_transfer.groups.group import SENDER, Group, Wire
from quartet.weight_transfer.groups.wires import gloo_wire, nccl_wire

HOST = "127.0.0.1"
ROUNDS = 5


def main(
    device: str = "cuda",
    mib: int = 256,
    stall_s: Annotated[float, typer.Option(help="deadline of every operation")] = 3.0,
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    results = Results("group", out)
    # Before CUDA is used, by this process and those it starts.
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    os.environ["NCCL_HOSTID"] = "sender"
    pair = TwoRanks(device, mib, stall_s)
    try:
        results.attempt("two members, five broadcasts", pair.broadcasts)
        results.attempt("again, as the next membership", pair.broadcasts)
        results.attempt("a member that never joins", pair.absent)
        results.attempt("afterwards", pair.broadcasts)
        results.attempt("a member that is frozen", lambda: pair.lost(signal.SIGSTOP))
        results.attempt("afterwards, another member", pair.broadcasts)
        results.attempt("a member that is killed", lambda: pair.lost(signal.SIGKILL))
        results.attempt("afterwards, another member", pair.broadcasts)
    finally:
        pair.end()
    results.show()


class TwoRanks:
    """A sender here and a member elsewhere, which is replaced when it was lost."""

    def __init__(self, device: str, mib: int, stall_s: float) -> None:
        self._device, self._stall_s = device, stall_s
        self._data = torch.randint(0, 255, (mib << 20,), dtype=torch.uint8, device=device)
        self._store = serve_store(HOST, stall_s)
        self._membership = 0
        self._process: Any = None

    def broadcasts(self) -> dict[str, Cell]:
        """Seconds to form the group, and GiB/s; whether the member got what was sent."""
        group, took = self._join()
        began = time.perf_counter()
        try:
            for _ in range(ROUNDS):
                group.broadcast(self._data)
            rate = ROUNDS * len(self._data) / 2**30 / (time.perf_counter() - began)
            # Asked before the group is closed: a sender has finished when its last bytes are on their way.
            right = self._answer() == hashlib.sha256(self._data.cpu().numpy()).hexdigest()
        finally:
            group.close()
        return {"join_s": took, "gib_s": rate, "right": str(right)}

    def absent(self) -> dict[str, Cell]:
        """Seconds until the sender gives up."""
        self._membership += 1
        return self._until_failure(lambda: self._group(world_size=2))

    def lost(self, how: signal.Signals) -> dict[str, Cell]:
        """Seconds until the sender notices, after one broadcast that went well."""
        group, _ = self._join()
        group.broadcast(self._data)
        os.kill(self._process.pid, how)

        def go_on() -> None:
            for _ in range(ROUNDS):
                group.broadcast(self._data)

        noticed = self._until_failure(go_on)
        began = time.perf_counter()
        group.close()
        self._process.kill()
        self._process.join()
        return noticed | {"close_s": time.perf_counter() - began}

    def _until_failure(self, action: Any) -> dict[str, Cell]:
        began = time.perf_counter()
        try:
            action()
        except RuntimeError as error:
            return {"noticed_s": time.perf_counter() - began, "as": str(error).splitlines()[0][:80]}
        return {"noticed_s": "never"}

    def _join(self) -> tuple[Group, float]:
        if self._process is None or not self._process.is_alive():
            self._start()
        self._membership += 1
        self._pipe.send(self._membership)
        began = time.perf_counter()
        return self._group(world_size=2), time.perf_counter() - began

    def _group(self, world_size: int) -> Group:
        place = {"rank": SENDER, "world_size": world_size, "membership": self._membership}
        return Group(self._store, wire(self._device, self._stall_s), **place, timeout_s=self._stall_s)

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, end = spawn.Pipe()
        given = (end, self._store.port, self._device, len(self._data), self._stall_s)
        self._process = spawn.Process(target=member, args=given, daemon=True)
        self._process.start()
        end.close()
        assert self._answer() == "ready"

    def _answer(self) -> str:
        if not self._pipe.poll(120):
            raise RuntimeError("the member says nothing")
        try:
            return str(self._pipe.recv())
        except EOFError:
            self._process.kill()
            self._process.join()
            raise RuntimeError("the member has ended") from None

    def end(self) -> None:
        """Ends the member."""
        if self._process is not None:
            self._process.kill()


def wire(device: str, stall_s: float) -> Wire:
    """NCCL's on a GPU; on a CPU gloo's, through a device of its own all the same."""
    where = torch.device(device)
    return nccl_wire(where, stall_s) if where.type == "cuda" else Wire(gloo_wire(HOST).form, where)


def member(pipe: Connection, port: int, device: str, size: int, stall_s: float) -> None:
    """Joins the memberships that it is told, and receives."""
    os.environ["NCCL_HOSTID"] = "member"
    store, data = reach_store(HOST, port, stall_s), torch.zeros(size, dtype=torch.uint8, device=device)
    pipe.send("ready")
    while True:
        membership = pipe.recv()
        group = Group(store, wire(device, stall_s), rank=1, world_size=2, membership=membership, timeout_s=stall_s)
        for _ in range(ROUNDS):
            group.broadcast(data)
        group.close()
        pipe.send(hashlib.sha256(data.cpu().numpy()).hexdigest())


if __name__ == "__main__":
    typer.run(main)
