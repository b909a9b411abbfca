"""How a replica hands out what its engine finishes, and reads the seeds of a request."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from services.common.config.limits import LimitsConfig
from services.common.serving.slots import Slots
from services.common.wire.codec import pack_longs
from services.common.wire.errors import InvalidArgument, Unavailable
from services.common.wire.ragged import Ragged
from services.rollout.replica import _as_finished, _enter, _seeds
from services.rollout.sample import FinishReason, Sample, Sampling
from tests.unit.batches import share

SAMPLING = Sampling(max_new_tokens=4)


class FakeEngine:
    """Finishes a request when told to, in a good way or a bad one."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[list[int], Sampling, int | None]] = {}
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []

    async def generate(self, index: int, prompt_ids: Any, sampling: Sampling, seed: int | None) -> Sample:
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


def start(engine: Any, count: int = 4, **options: float) -> Any:
    prompts = Ragged(np.arange(10, 10 + count, dtype=np.int32), np.ones(count, np.int32))
    slots = Slots(8, LimitsConfig(), quantum=64)
    return _as_finished(_enter(slots, share(), engine, prompts, SAMPLING, list(range(count))), **options)


async def indices(finished: Any) -> list[int]:
    return sorted(sample.index for sample in await anext(finished))


async def test_samples_are_handed_out_as_they_finish() -> None:
    engine = FakeEngine()
    finished = start(engine)
    first = asyncio.create_task(indices(finished))
    await engine.begun(4)
    assert engine.asked == {index: ([10 + index], SAMPLING, index) for index in range(4)}
    engine.finish(2)
    assert await first == [2]
    engine.finish(0, 3)
    assert await indices(finished) == [0, 3]
    engine.finish(1)
    assert await indices(finished) == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(finished)
    assert engine.cancelled == []


async def test_while_nothing_finishes_a_heartbeat_is_heard() -> None:
    engine = FakeEngine()
    finished = start(engine, 1, heartbeat_s=0.05)
    assert [await anext(finished), await anext(finished)] == [[], []]
    engine.finish(0)
    assert await indices(finished) == [0]


async def test_a_failure_loses_nothing_that_is_finished_and_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    finished = start(engine)
    first = asyncio.create_task(indices(finished))
    await engine.begun(4)
    engine.fail(0, Unavailable("dropped"))
    engine.finish(2)
    engine.fail(3, Unavailable("dropped"))
    assert await first == [2]
    with pytest.raises(Unavailable, match="dropped"):
        await anext(finished)
    assert engine.cancelled == [1]


async def test_whoever_leaves_early_cancels_the_rest() -> None:
    engine = FakeEngine()
    finished = start(engine)
    first = asyncio.create_task(indices(finished))
    await engine.begun(4)
    engine.finish(1)
    assert await first == [1]
    await finished.aclose()
    assert sorted(engine.cancelled) == [0, 2, 3]


async def test_cancelling_reaches_the_engine() -> None:
    engine = FakeEngine()
    first = asyncio.create_task(indices(start(engine)))
    await engine.begun(4)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert sorted(engine.cancelled) == [0, 1, 2, 3]


def test_seeds_of_a_request() -> None:
    assert _seeds(b"", 2) == [None, None]
    assert _seeds(pack_longs([0, 2**63 - 1]), 2) == [0, 2**63 - 1]
    for data, message in (
        (pack_longs([1]), "seeds: 1 for 2 prompts; send one each, or none"),
        (bytes(9), "seeds: 9 bytes are not a whole number of 8-byte int64 values"),
        (pack_longs([1, -1]), "seeds[1]: -1; must be 0 or more"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            _seeds(data, 2)
