"""Log-probs of samples as they are finished: each gets its own of a call for several, and what errors do."""

import asyncio
from typing import Any

import numpy as np
import pytest

from orchestrator.policy.early import early_logprobs
from quartet.columns import Columns
from quartet.wire.codec import Floats
from quartet.wire.ragged import Ragged
from quartet.wire.together import Together
from tests.trajectories import cut, of


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.of([np.asarray(row, np.int32) for row in rows])


class FakeLearner:
    """Gives every token minus its id plus the prompt's length; a call ends when it is let through."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []
        self.let = asyncio.Semaphore(0)
        self.failure: Exception | None = None

    async def logprobs(self, trajectories: Columns) -> Floats:
        prompts, responses = trajectories.prompts, trajectories.responses
        self.calls.append([row.tolist() for row in responses])
        await self.let.acquire()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return np.concatenate([len(p) - r.astype(np.float32) for p, r in zip(prompts, responses, strict=True)])


async def until(learner: FakeLearner, calls: int) -> None:
    async with asyncio.timeout(10):
        while len(learner.calls) < calls:
            await asyncio.sleep(0)


def ask(early: Together[Columns, Floats], prompts: Ragged, responses: Ragged) -> "asyncio.Task[list[Any]]":
    async def rows() -> list[Any]:
        return [row.tolist() for row in cut(await early(of(prompts, responses)), responses)]

    return asyncio.create_task(rows())


async def test_samples_that_come_during_a_call_are_in_the_next_together() -> None:
    learner = FakeLearner()
    early = early_logprobs(learner.logprobs)
    first = ask(early, ragged([1]), ragged([5, 6]))
    await until(learner, 1)
    second = ask(early, ragged([1, 1], [1]), ragged([7], [8, 9, 9]))
    third = ask(early, ragged([1, 1, 1]), ragged([4]))
    await asyncio.sleep(0)
    assert learner.calls == [[[5, 6]]]
    learner.let.release()
    learner.let.release()
    assert await first == [[-4, -5]]
    assert await second == [[-5], [-7, -8, -8]]
    assert await third == [[-1]]
    assert learner.calls == [[[5, 6]], [[7], [8, 9, 9], [4]]]


async def test_an_error_is_for_the_samples_of_its_call_and_those_that_come_later_ask_again() -> None:
    learner = FakeLearner()
    early = early_logprobs(learner.logprobs)
    first = ask(early, ragged([1]), ragged([5]))
    await until(learner, 1)
    later = ask(early, ragged([1]), ragged([6]))
    await asyncio.sleep(0)
    learner.failure = RuntimeError("lost")
    learner.let.release()
    learner.let.release()
    with pytest.raises(RuntimeError, match="lost"):
        await first
    assert await later == [[-5]]
