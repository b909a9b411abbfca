"""Tries a critic's only rank, as an actor that computes in its replica's place, on a Ray of its own.

    python -m tests.critic_ranks

Prints what it found, as JSON. A program for the reasons of tests/placement.py; give it a HOME of its own too.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import psutil
import ray

from quartet.config.learner import LearnerConfig
from quartet.ranks.group import RankGroup, RanksLost
from quartet.ranks.ranks import Ranks
from quartet.wire.errors import InvalidArgument

VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE_S = 30.0


class Odd(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Trainer:
    """The trainer that the rank's process runs."""

    def __init__(self, ranks: Ranks) -> None:
        self.seen: list[int] = []

    def pid(self) -> int:
        return os.getpid()

    def described(self) -> dict[str, Any]:
        """The variables and the node that the process was given, and its title."""
        from quartet.models.device import may_use_gpus

        variables = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "QUARTET_TEST", VISIBLE)}
        node, title = ray.get_runtime_context().get_node_id(), psutil.Process().cmdline()[0]
        return variables | {"node": node, "title": title, "gpus": may_use_gpus()}

    def note(self, number: int, seconds: float = 0) -> list[int]:
        time.sleep(seconds)
        self.seen.append(number)
        return list(self.seen)

    def size(self, batch: bytes) -> int:
        return len(batch)

    def fail(self, how: str) -> None:
        raise InvalidArgument(how) if how == "path" else Odd("o", "dd")


class Replica:
    """In the place of a critic's replica, which makes the rank."""

    def __init__(self, visible: str) -> None:
        # As Ray sets it for a replica with a share of a GPU; this machine need not have one.
        import torch

        from quartet.ranks import ray_rank

        if visible:
            os.environ[VISIBLE] = visible
            mock.patch.object(ray_rank, "default_device", return_value=torch.device("cuda")).start()
        self._ray_rank = ray_rank
        self._group: RankGroup | None = None

    async def start(self) -> int:
        """Starts ranks in place of those that are there; the process id."""
        if self._group:
            self._group.stop()
        config = LearnerConfig.model_construct(ranks=1, rank_timeout_s=60.0)
        self._group = self._ray_rank.ray_ranks("critic", config, self._ray_rank.makers_place())
        await self._group.start(Trainer, timeout_s=120)
        return await self._group.call(Trainer.pid, 60)

    async def start_while_stopped(self, gcs: int) -> bool:
        """Starts ranks while Ray's GCS is stopped; True if the event loop goes on meanwhile."""
        with stopped(gcs) as process:
            starting = asyncio.ensure_future(self.start())
            for _ in range(20):
                await asyncio.sleep(0.05)
            went_on = process.status() == psutil.STATUS_STOPPED and not starting.done()
        await starting
        return went_on

    async def end_while_stopped(self, gcs: int) -> bool:
        """Ends a rank when Ray has just made it, at which moment its GCS is stopped; True if that does not wait for
        the GCS."""
        with contextlib.ExitStack() as stack:

            async def made(make: Callable[[], Any], name: str) -> Any:
                handle = make()
                stack.enter_context(stopped(gcs))
                return handle

            config = LearnerConfig.model_construct(ranks=1, rank_timeout_s=60.0)
            with mock.patch.object(self._ray_rank, "in_thread", made):
                group = self._ray_rank.ray_ranks("critic", config, self._ray_rank.makers_place())
                (rank,) = group._ranks
                assert isinstance(rank, self._ray_rank.RayRank)
                await rank._making
            group.stop()
            return psutil.Process(gcs).status() == psutil.STATUS_STOPPED

    async def batch_while_stopped(self, raylet: int) -> tuple[bool, int]:
        """Calls a rank with a batch while the node's raylet is stopped, which has to make room for it; True if the
        event loop goes on meanwhile, and what the rank got."""
        group, batch = self._group, bytes(64 << 20)
        assert group
        with stopped(raylet) as process:
            calling = asyncio.ensure_future(group.call(Trainer.size, 60, group.share(batch)))
            for _ in range(20):
                await asyncio.sleep(0.05)
            went_on = process.status() == psutil.STATUS_STOPPED and not calling.done()
        return went_on, await calling

    async def described(self) -> tuple[dict[str, Any], str]:
        assert self._group
        return await self._group.call(Trainer.described, 60), ray.get_runtime_context().get_node_id()

    async def calls(self) -> dict[str, Any]:
        """In turn, beside one another, and those that fail."""
        group = self._group
        assert group
        turns = await asyncio.gather(*(group.call(Trainer.note, 60, n, seconds=0.1 / n) for n in (1, 2, 3)))
        slow = asyncio.ensure_future(group.call(Trainer.note, 60, 4, seconds=2))
        await asyncio.sleep(0.5)
        beside = await group.beside(1, Trainer.note, 60, 5)
        errors = []
        for how in ("path", "odd"):
            try:
                await group.call(Trainer.fail, 60, how)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])
        return {"turns": turns[-1], "beside": beside[0], "slow": await slow, "errors": errors}

    async def lost(self, number: int) -> tuple[float, str]:
        """Sends the signal to the rank in a call; the seconds after which the call ended, and how."""
        group = self._group
        assert group
        pid = await group.call(Trainer.pid, 60)
        calling = asyncio.ensure_future(group.call(Trainer.note, 600, 6, seconds=500))
        await asyncio.sleep(0.5)
        os.kill(pid, number)
        began = time.monotonic()
        try:
            await calling
        except RanksLost as error:
            return time.monotonic() - began, str(error)
        raise AssertionError("the call has an answer")

    async def frozen_in_its_start(self) -> tuple[float, str, int]:
        """Stops a rank's process as soon as it is known, which is before it has read its libraries; the seconds after
        which the start ended, how, and the process id."""
        if self._group:
            self._group.stop()
        config = LearnerConfig.model_construct(ranks=1, rank_timeout_s=60.0)
        self._group = self._ray_rank.ray_ranks("critic", config, self._ray_rank.makers_place())
        (rank,) = self._group._ranks
        assert isinstance(rank, self._ray_rank.RayRank)
        starting = asyncio.ensure_future(self._group.start(Trainer, timeout_s=600))
        async with asyncio.timeout(PATIENCE_S):
            while rank._here is None:
                await asyncio.sleep(0.005)
        frozen = rank._here
        frozen.suspend()
        began = time.monotonic()
        try:
            await starting
        except RanksLost as error:
            return time.monotonic() - began, str(error), frozen.pid
        raise AssertionError("it started")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[psutil.Process]:
    """Context in which the process is stopped, for PATIENCE_S at most."""
    process, over = psutil.Process(pid), threading.Event()

    def wake() -> None:
        over.wait(PATIENCE_S)
        process.resume()

    waking = threading.Thread(target=wake)
    process.suspend()
    waking.start()
    try:
        yield process
    finally:
        over.set()
        waking.join()


def ended_s(pid: int) -> float:
    """Seconds until the process has ended."""
    began = time.monotonic()
    while psutil.pid_exists(pid) and time.monotonic() < began + PATIENCE_S:
        time.sleep(0.02)
    return time.monotonic() - began


def replica(visible: str = "") -> Any:
    options: dict[str, Any] = {"num_cpus": 2, "runtime_env": {"env_vars": {"QUARTET_TEST": "7"}}}
    return ray.remote(**options)(Replica).remote(visible)


def tried() -> dict[str, Any]:
    found: dict[str, Any] = {}
    one = replica()
    before = ray.get(one.start.remote(), timeout=120)
    found["described"] = ray.get(one.described.remote(), timeout=60)
    found["calls"] = ray.get(one.calls.remote(), timeout=60)
    pid = ray.get(one.start.remote(), timeout=120)  # a restoration
    found["restored"] = ended_s(before)
    found["killed"] = ray.get(one.lost.remote(int(signal.SIGKILL)), timeout=120), ended_s(pid)
    pid = ray.get(one.start.remote(), timeout=120)
    found["frozen"] = ray.get(one.lost.remote(int(signal.SIGSTOP)), timeout=120), ended_s(pid)
    *ended, pid = ray.get(one.frozen_in_its_start.remote(), timeout=120)
    found["frozen in its start"] = ended, ended_s(pid)
    family = psutil.Process().children(recursive=True)
    gcs, raylet = (next(each for each in family if each.name().startswith(name)) for name in ("gcs_server", "raylet"))
    found["GCS stopped, a start"] = ray.get(one.start_while_stopped.remote(gcs.pid), timeout=120)
    found["GCS stopped, an end"] = ray.get(one.end_while_stopped.remote(gcs.pid), timeout=120)
    pid = ray.get(one.start.remote(), timeout=120)
    found["raylet stopped, a batch"] = ray.get(one.batch_while_stopped.remote(raylet.pid), timeout=120)
    ray.kill(one)
    found["replica killed"] = ended_s(pid)
    other = replica("5")
    pid = ray.get(other.start.remote(), timeout=120)
    found["on a GPU"] = ray.get(other.described.remote(), timeout=60)[0]
    os.kill(pid, signal.SIGSTOP)
    ray.kill(other)
    found["replica killed, rank frozen"] = ended_s(pid)
    return found


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    print(json.dumps(tried()))
