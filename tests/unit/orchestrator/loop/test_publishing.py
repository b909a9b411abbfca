"""Pushes beside the loop, one after the other, and their metrics."""

import asyncio
from pathlib import Path

from orchestrator.experience.beside import Beside
from orchestrator.loop.publishing import Publishing
from orchestrator.push.pusher import PushReport
from tests.unit.fakes import make_config
from tests.unit.waiting import settled


class Proving:
    """A pusher whose first and third push are proved."""

    async def push(self, version: int) -> PushReport:
        return PushReport(version, ("a",), 0.5 * version, 1, "sum", 0.01 * version if version % 2 else None)


async def test_what_a_proof_measured_is_told_once(policy_folder: Path) -> None:
    async with Beside() as beside:
        publishing = Publishing(Proving(), beside, lambda version: None, make_config(policy_folder))  # type: ignore[arg-type]
        told = [publishing.measured()]
        for version in (1, 2, 3):
            await publishing.publish(version)
            told += [publishing.measured(), publishing.measured()]
    seconds = [{"seconds/push": seconds} for seconds in (0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5)]
    proved = {1: {"push/difference": 0.01}, 5: {"push/difference": 0.03}}
    assert told == [line | proved.get(at, {}) for at, line in enumerate(seconds)]


class Staging:
    """A pusher whose deliveries end when they are let."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.let = asyncio.Event()

    async def stage(self, version: int) -> int:
        self.events.append(("stage", version))
        return version

    async def deliver(self, staged: int) -> PushReport:
        await self.let.wait()
        self.events.append(("deliver", staged))
        return PushReport(staged, ("a",), 1.0, 1, "sum")


async def test_weights_are_not_staged_over_those_that_are_being_delivered(policy_folder: Path) -> None:
    pusher, served = Staging(), list[int]()
    config = make_config(policy_folder, loop={"max_staleness": 1})
    async with Beside() as beside:
        publishing = Publishing(pusher, beside, served.append, config)  # type: ignore[arg-type]
        await publishing.publish(1)
        assert (pusher.events, served) == ([("stage", 1)], [])
        second = asyncio.create_task(publishing.publish(2))
        await settled()
        assert pusher.events == [("stage", 1)]
        pusher.let.set()
        await second
        await publishing.settled()
    assert pusher.events == [("stage", 1), ("deliver", 1), ("stage", 2), ("deliver", 2)]
    assert served == [1, 2]
