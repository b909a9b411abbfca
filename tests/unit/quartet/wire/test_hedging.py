"""A second attempt beside the first: who answers, who is cancelled, and when it begins."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from protos import common_pb2, reward_pb2
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from quartet.wire.codec import pack_floats
from quartet.wire.errors import InvalidArgument, ResourceExhausted, Unavailable
from quartet.wire.hedging import HedgingDelay, first_answer
from services.reward.client import RewardClient
from tests.trajectories import of
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled
from tests.unit.wire import served


def now() -> float:
    return asyncio.get_running_loop().time()


class Attempts:
    """Each follows its line of the script: seconds, then an error or an answer."""

    def __init__(self, *script: tuple[float, Any]) -> None:
        self._script = script
        self.begun: list[float] = []
        self.cancelled = 0

    async def __call__(self) -> Any:
        seconds, end = self._script[len(self.begun)]
        self.begun.append(now())
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(end, Exception):
            raise end
        return end


async def counted(attempts: Attempts) -> tuple[int, int]:
    """Numbers of attempts that have begun, and of those that were cancelled."""
    await settled()
    return len(attempts.begun), attempts.cancelled


@in_virtual_time
async def test_one_that_answers_in_time_stays_alone() -> None:
    attempts = Attempts((2, "first"))
    assert await first_answer(attempts, pause_s=3) == "first"
    assert await counted(attempts) == (1, 0)


@in_virtual_time
async def test_a_silent_one_is_overtaken_and_cancelled() -> None:
    attempts = Attempts((60, "first"), (2, "second"))
    assert await first_answer(attempts, pause_s=3) == "second"
    assert await counted(attempts) == (2, 1)
    assert (attempts.begun, now()) == ([0, 3], 5)


@in_virtual_time
async def test_an_answer_counts_though_a_refusal_comes_at_the_same_moment() -> None:
    """Either could be the end of a call for which no attempt is left to wait."""
    for first, second in ((Unavailable("gone"), "answer"), ("answer", Unavailable("gone"))):
        attempts = Attempts((5, first), (2, second))
        assert await first_answer(attempts, pause_s=3) == "answer"
        assert await counted(attempts) == (2, 0)


@in_virtual_time
async def test_a_slow_one_is_not_given_up() -> None:
    attempts = Attempts((30, "first"), (60, "second"), (60, "third"), (60, "fourth"))
    assert await first_answer(attempts, pause_s=5) == "first"
    assert await counted(attempts) == (3, 2)
    assert (attempts.begun, now()) == ([0, 5, 10], 30)


@pytest.mark.parametrize("refusal", [Unavailable("gone"), ResourceExhausted("busy", 1.0)])
@in_virtual_time
async def test_a_refusal_leaves_it_to_the_others(refusal: Exception) -> None:
    attempts = Attempts((30, "first"), (1, refusal), (1, refusal))
    assert await first_answer(attempts, pause_s=10) == "first"
    alone = Attempts((0, refusal))
    with pytest.raises(type(refusal)):
        await first_answer(alone, pause_s=10)
    assert len(alone.begun) == 1


@in_virtual_time
async def test_any_other_error_is_the_answer() -> None:
    attempts = Attempts((60, "first"), (1, InvalidArgument("no")))
    with pytest.raises(InvalidArgument):
        await first_answer(attempts, pause_s=5)
    assert await counted(attempts) == (2, 1)


@in_virtual_time
async def test_cancelling_the_caller_ends_all_attempts() -> None:
    attempts = Attempts((60, 1), (60, 2), (60, 3))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20):
            await first_answer(attempts, pause_s=5)
    assert await counted(attempts) == (3, 3)


def test_the_delay_follows_what_is_usual_within_bounds() -> None:
    delay = HedgingDelay(5)
    assert delay.seconds(60) == 5
    for seconds in (0.1, 0.2, 0.3, 40.0):
        delay.saw(seconds)
    assert delay.seconds(60) == 5
    for _ in range(8):
        delay.saw(4.0)
    assert delay.seconds(60) == 12
    assert delay.seconds(30) == 10
    assert delay.seconds(0.3) == pytest.approx(0.1)


def test_the_delay_grows_with_the_second_slow_answer_in_a_row_and_shrinks_with_a_fast_one() -> None:
    delay = HedgingDelay(5)
    for seconds in (0.3,) * 16 + (6.0,):
        delay.saw(seconds)
    assert delay.seconds(60) == 5
    delay.saw(7.0)
    assert delay.seconds(60) == 18  # 3 * 6
    delay.saw(0.3)
    assert delay.seconds(60) == 5


class Fleet(RewardServicer):  # type: ignore[misc]
    """Two replicas behind one port, taken in turns; the first is frozen."""

    def __init__(self) -> None:
        self.calls = 0

    async def Score(self, request: Any, context: Any) -> Any:
        return await self._answer(reward_pb2.ScoreResponse(scores=pack_floats(np.asarray([0.5], np.float32))))

    async def Info(self, request: common_pb2.InfoRequest, context: Any) -> Any:
        return await self._answer(reward_pb2.RewardInfo(scorers=[reward_pb2.ScorerInfo(identity={"name": "n"})]))

    async def _answer(self, reply: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            await asyncio.Event().wait()
        return reply


async def test_a_frozen_replica_costs_one_attempt_and_not_the_deadline() -> None:
    fleet = Fleet()
    async with served(add_RewardServicer_to_server, fleet) as channel:
        client = RewardClient(channel, attempt_s=0.3)
        began = time.monotonic()
        scores = await client.score(of([[5]], [[5]]), timeout_s=60)
        await client.info(60)
    assert scores.values.tolist() == [0.5]
    assert 0.6 <= time.monotonic() - began < 20
    assert fleet.calls == 4
