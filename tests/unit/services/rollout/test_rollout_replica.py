"""A replica hands out the samples that its engine finishes and has begun, and reads a request's seeds and tokens."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from quartet.config.limits import LimitsConfig
from quartet.serving.slots import EngineSlots
from quartet.wire.codec import pack_longs
from quartet.wire.errors import InvalidArgument, Unavailable
from quartet.wire.ragged import Ragged
from services.rollout.call import Call
from services.rollout.sample import FinishReason, Sample, Sampling, from_wire
from tests.unit.batches import share
from tests.unit.virtual_time import in_virtual_time

SAMPLING = Sampling(max_new_tokens=4)


class FakeEngine:
    """Finishes a request when told to, in a good way or a bad one."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[list[int], Sampling, int | None]] = {}
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.begun_with: dict[int, list[int]] = {}
        self.report: Callable[[Sample], None]
        self.cancelled: list[int] = []

    async def generate(
        self, index: int, prompt_ids: Any, sampling: Sampling, seed: int | None, begun: Any, report: Any
    ) -> Sample:
        self.begun_with[index], self.report = begun.tolist(), report
        self.asked[index] = (prompt_ids.tolist(), sampling, seed)
        self.ends[index] = asyncio.get_running_loop().create_future()
        try:
            await self.ends[index]
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        ids = np.asarray([index], np.int32)
        return Sample(index, ids, np.zeros(1, np.float32), FinishReason.LENGTH, ((1, 0, 1),))

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.ends) < count:
                await asyncio.sleep(0)

    def finish(self, *indices: int) -> None:
        for index in indices:
            self.ends[index].set_result(None)

    def fail(self, index: int, error: Exception) -> None:
        self.ends[index].set_exception(error)


def call(engine: Any, count: int = 4, seeds: bytes | None = None, begun: Sequence[Sequence[int]] = ()) -> Call:
    prompts = Ragged(np.arange(10, 10 + count, dtype=np.int32), np.ones(count, np.int32))
    tokens = Ragged.of([np.asarray(sequence, np.int32) for sequence in begun])
    return Call(engine, prompts, SAMPLING, pack_longs(range(count)) if seeds is None else seeds, tokens)


def start(engine: Any, count: int = 4, begun: Sequence[Sequence[int]] = (), **options: Any) -> Any:
    return call(engine, count, begun=begun).answers(EngineSlots(8, LimitsConfig(), quantum=64), share(), **options)


async def indices(answers: Any) -> list[int]:
    return sorted(finished(await anext(answers)))


def part(index: int, *tokens: int) -> Sample:
    return Sample(
        index, np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), None, ((1, 0, len(tokens)),)
    )


def tokens(answer: Any) -> list[tuple[int, list[int]]]:
    parts = [each for each in answer.segments if not each.finish_reason]
    return [(each.index, from_wire(each, each.index).response_ids.tolist()) for each in parts]


def finished(answer: Any) -> list[int]:
    """Indices of the responses that are finished."""
    return [each.index for each in answer.segments if each.finish_reason]


async def test_samples_are_handed_out_as_they_finish() -> None:
    engine = FakeEngine()
    stream = start(engine)
    first = asyncio.create_task(indices(stream))
    await engine.begun(4)
    assert engine.asked == {index: ([10 + index], SAMPLING, index) for index in range(4)}
    engine.finish(2)
    assert await first == [2]
    engine.finish(0, 3)
    assert await indices(stream) == [0, 3]
    engine.finish(1)
    assert await indices(stream) == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert engine.cancelled == []


@in_virtual_time
async def test_a_sample_waits_a_fifth_of_a_second_for_others_unless_it_is_the_last() -> None:
    engine, clock = FakeEngine(), asyncio.get_running_loop()
    for index, ends in enumerate((0.1, 0.25, 0.4, 1.0, 1.05)):
        clock.call_at(ends, engine.finish, index)
    heard = [(round(clock.time(), 3), finished(answer)) async for answer in start(engine, 5)]
    assert heard == [(0.3, [0, 1]), (0.6, [2]), (1.05, [3, 4])]


async def test_while_nothing_finishes_a_heartbeat_is_heard() -> None:
    engine = FakeEngine()
    stream = start(engine, 1, heartbeat_s=0.05)
    assert [await indices(stream), await indices(stream)] == [[], []]
    engine.finish(0)
    assert await indices(stream) == [0]


async def test_parts_come_with_the_next_message_but_not_beside_their_own_sample() -> None:
    engine = FakeEngine()
    answers = start(engine, 3, heartbeat_s=0.05)
    first = asyncio.create_task(anext(answers))
    await engine.begun(3)
    engine.report(part(0, 5, 6))
    engine.report(part(1, 7))
    assert tokens(await first) == [(0, [5, 6]), (1, [7])]
    engine.report(part(0, 8))
    engine.report(part(2, 9))
    engine.finish(0)
    answer = await anext(answers)
    assert (finished(answer), tokens(answer)) == ([0], [(2, [9])])
    await answers.aclose()


@in_virtual_time
async def test_parts_come_with_the_heartbeat() -> None:
    engine, clock = FakeEngine(), asyncio.get_running_loop()
    clock.call_at(0.1, lambda: engine.report(part(0, 5)))
    clock.call_at(3.0, engine.finish, 0)
    heard = [(round(clock.time(), 3), len(tokens(answer))) async for answer in start(engine, 1)]
    assert heard == [(2.0, 1), (3.0, 0)]


async def test_what_the_engine_has_of_a_response_that_it_ends_is_sent_before_the_failure() -> None:
    engine = FakeEngine()
    answers = start(engine, 2)
    first = asyncio.create_task(anext(answers))
    await engine.begun(2)
    for index in (0, 1):
        engine.report(part(index, 5 + index))
        engine.fail(index, Unavailable("ended"))
    assert tokens(await first) == [(0, [5]), (1, [6])]
    with pytest.raises(Unavailable, match="ended"):
        await anext(answers)


async def test_the_engine_is_told_which_tokens_a_response_has() -> None:
    engine = FakeEngine()
    first = asyncio.create_task(anext(start(engine, 3, begun=[[], [7, 8, 9], [5]])))
    await engine.begun(3)
    assert engine.begun_with == {0: [], 1: [7, 8, 9], 2: [5]}
    first.cancel()


def test_tokens_of_a_request() -> None:
    for begun, message in (
        ([[5]], "begun: 1 sequences for 2 prompts; send one each, or none"),
        ([[], [5, 6, 7, 8]], "begun[1]: 4 tokens; must be fewer than sampling.max_new_tokens, 4"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            call(FakeEngine(), 2, begun=begun)


async def test_a_failure_loses_nothing_that_is_finished_and_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    stream = start(engine)
    first = asyncio.create_task(indices(stream))
    await engine.begun(4)
    engine.fail(0, Unavailable("dropped"))
    engine.finish(2)
    engine.fail(3, Unavailable("dropped"))
    assert await first == [2]
    with pytest.raises(Unavailable, match="dropped"):
        await anext(stream)
    assert engine.cancelled == [1]


async def test_a_caller_that_leaves_early_cancels_the_rest() -> None:
    engine = FakeEngine()
    stream = start(engine)
    first = asyncio.create_task(indices(stream))
    await engine.begun(4)
    engine.finish(1)
    assert await first == [1]
    await stream.aclose()
    assert sorted(engine.cancelled) == [0, 2, 3]


async def test_cancelling_reaches_the_engine() -> None:
    engine = FakeEngine()
    first = asyncio.create_task(indices(start(engine)))
    await engine.begun(4)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert sorted(engine.cancelled) == [0, 1, 2, 3]


async def test_seeds_of_a_request() -> None:
    for data, seeds in ((b"", [None, None]), (pack_longs([0, 2**63 - 1]), [0, 2**63 - 1])):
        engine = FakeEngine()
        answers = call(engine, 2, data).answers(EngineSlots(8, LimitsConfig(), quantum=64), share())
        first = asyncio.create_task(anext(answers))
        await engine.begun(2)
        assert [engine.asked[row][2] for row in (0, 1)] == seeds
        first.cancel()
    for data, message in (
        (pack_longs([1]), "seeds: 1 for 2 prompts; send one each, or none"),
        (bytes(9), "seeds: 9 bytes are not a whole number of 8-byte int64 values"),
        (pack_longs([1, -1]), "seeds[1]: -1; must be 0 or more"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            call(FakeEngine(), 2, data)
