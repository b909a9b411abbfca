"""A call to every replica waits for answers as long as it must, when some fail and others are late."""

import asyncio
from collections.abc import Sequence

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from protos import rollout_pb2 as pb
from quartet.wire.errors import Unavailable
from services.rollout.fanout import broadcast, gathered
from tests.unit.virtual_time import in_virtual_time

GRACE_S = 0.1
LATE_S = 3 * GRACE_S


async def answer(name: str, seconds: float = 0.0) -> bytes:
    await asyncio.sleep(seconds)
    return pb.WeightReport(replica=name, ok=True).SerializeToString()


async def lost(seconds: float = 0.0) -> bytes:
    await asyncio.sleep(seconds)
    raise ConnectionError("the replica died")


async def names(answers: Sequence[object], members: Sequence[str], timeout_s: float = 60.0) -> list[str]:
    reports = await gathered(answers, members, timeout_s, GRACE_S)  # type: ignore[arg-type]
    return sorted(report.replica for report in reports)


@in_virtual_time
async def test_all_members_are_enough_even_if_others_do_not_answer() -> None:
    assert await names([answer("a"), answer("b"), answer("new", 60)], ["a", "b"]) == ["a", "b"]
    assert asyncio.get_running_loop().time() == 0


@in_virtual_time
async def test_the_error_of_a_replica_that_is_not_a_member_leaves_the_members_their_time() -> None:
    assert await names([answer("a"), answer("b", LATE_S), lost()], ["a", "b"]) == ["a", "b"]


@in_virtual_time
async def test_when_a_member_is_certainly_lost_the_others_get_the_grace_alone() -> None:
    assert await names([answer("a"), answer("b", 60), lost()], ["a", "b", "c"]) == ["a"]


@in_virtual_time
async def test_a_lost_member_is_certain_once_a_newcomer_has_answered_in_its_place() -> None:
    answers = [answer("a"), answer("b", 60), lost(), answer("new", GRACE_S / 2)]
    assert await names(answers, ["a", "b", "c"]) == ["a", "new"]


@in_virtual_time
async def test_a_member_that_serve_does_not_call_is_missed_from_the_beginning() -> None:
    assert await names([answer("a"), answer("b", 60)], ["a", "b", "c"]) == ["a"]


@in_virtual_time
async def test_without_members_every_answer_is_waited_for_until_one_fails() -> None:
    assert await names([answer("a"), answer("b", LATE_S)], []) == ["a", "b"]
    assert await names([answer("a"), answer("b", 60), lost()], []) == ["a"]


@in_virtual_time
async def test_the_deadline_ends_the_wait() -> None:
    assert await names([answer("a"), answer("b", 60)], ["a", "b"], timeout_s=0.1) == ["a"]


@in_virtual_time
async def test_others_get_a_moment_once_all_members_have_answered_where_they_count_too() -> None:
    """Discover takes in replicas that have come since; one that stands still must not hold every push up."""
    answers = [answer("a"), answer("b", LATE_S), answer("new", 2 * LATE_S), answer("frozen", 60)]
    reports = await gathered(answers, ["a", "b"], 60, GRACE_S, others_s=3 * LATE_S)
    assert sorted(report.replica for report in reports) == ["a", "b", "new"]
    assert asyncio.get_running_loop().time() == pytest.approx(4 * LATE_S)


class Handle:
    """A handle of Serve's whose router knows no replicas, or whose controller is gone."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def broadcast(self, method: str, phase: bytes) -> "Handle":
        return self

    async def _fetch_replica_results_async(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [DeploymentUnavailableError(DeploymentID("Rollout", "rollout")), RayActorError()])
@in_virtual_time
async def test_replicas_that_serve_does_not_know_at_the_moment_are_away_and_not_broken(error: Exception) -> None:
    with pytest.raises(Unavailable, match="Serve names no rollout replicas"):
        await broadcast(Handle(error), pb.WeightPhase(timeout_s=5))
