"""Members that stand still during a phase are found by short questions, long before the deadline of the work."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.replicas import Missing, Replicas
from protos import rollout_pb2 as pb
from quartet.wire.errors import Unavailable
from tests.unit.virtual_time import in_virtual_time

MEMBERS = ("a", "b")
LOST = Unavailable("the proxy is gone")


class Asked:
    """A rollout client whose phases take `work_s`, and whose questions beside them have these answers, the last
    again and again: the members that do, or an error of the call."""

    def __init__(self, work_s: float, *answers: Collection[str] | Unavailable) -> None:
        self.work_s, self.answers = work_s, list(answers)
        self.questions = self.working = 0

    async def update_weights(self, timeout_s: float, members: Any = (), **phase: Any) -> list[pb.WeightReport]:
        if "discover" not in phase:
            self.working += 1
            try:
                await asyncio.sleep(min(self.work_s, timeout_s))
            finally:
                self.working -= 1
            return [pb.WeightReport(replica=name, ok=True) for name in members]
        self.questions += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Unavailable):
            raise answer
        if set(answer) != set(members):
            await asyncio.sleep(timeout_s)
        return [pb.WeightReport(replica=name, ok=True) for name in answer]


def replicas(asked: Asked) -> Replicas:
    return Replicas(asked, WeightsConfig())  # type: ignore[arg-type]


@in_virtual_time
async def test_a_member_that_answers_neither_of_two_questions_stands_still() -> None:
    loop, asked = asyncio.get_running_loop(), Asked(600, ["a", "b"], LOST, ["a"])
    with pytest.raises(Missing, match=r"^b: stands still during transfer$") as caught:
        await replicas(asked).phase(MEMBERS, 600, transfer=pb.Transfer())
    assert caught.value.silent == {"b"}
    # Four seconds of pauses between questions, and two questions that are not answered in two seconds.
    assert (loop.time(), asked.questions) == (8, 4)
    assert asked.working == 0  # the phase is not waited for any longer


@in_virtual_time
async def test_a_member_that_misses_questions_but_never_two_in_a_row_is_waited_for() -> None:
    """A question that fails as a whole says nothing of members: it begins the count again."""
    asked = Asked(20, ["a"], ["a", "b"], ["a"], LOST, ["a"], ["b"], ["a", "b"])
    reports = await replicas(asked).phase(MEMBERS, 600, transfer=pb.Transfer())
    assert [report.replica for report in reports] == ["a", "b"]
    questions = asked.questions
    assert questions > 7
    await asyncio.sleep(60)
    assert asked.questions == questions  # none after the phase


@in_virtual_time
async def test_a_proof_is_not_waited_for_where_a_member_stands_still() -> None:
    loop = asyncio.get_running_loop()
    assert await replicas(Asked(600, ["a"])).score(MEMBERS, pb.Probe()) == []
    assert loop.time() == 6
