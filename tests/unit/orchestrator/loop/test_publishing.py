"""Metrics of pushes."""

from pathlib import Path

from orchestrator.experience.beside import Beside
from orchestrator.loop.publishing import Publishing
from orchestrator.push.pusher import PushReport
from tests.unit.fakes import make_config


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
