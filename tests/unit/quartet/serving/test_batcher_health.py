"""Health of a batched model: the deadline of a pass, and tests of an idle model."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quartet.serving.batcher import HungError
from quartet.wire.errors import InvalidArgument, Unavailable
from tests.unit.batches import Doubler, Numbers, ask, busy, make_batcher, queued, share
from tests.unit.virtual_time import VirtualLoop
from tests.unit.waiting import settled


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


async def test_a_hung_pass_answers_everyone_and_health_says_for_how_long(doubler: Doubler) -> None:
    batcher = make_batcher(doubler, batch_s=1.5)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1], [2])
    # Before the deadline nothing is wrong, and health answers while the pass computes.
    await asyncio.wait_for(batcher.check_health(lambda: None), 10)
    answers = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unavailable] * 3
    assert "will be replaced" in str(answers[0])
    says = r"a batch of 1 rows and 1 tokens for run has run for \d+ s, longer than batch_s, 1.5 s; now"
    with pytest.raises(RuntimeError, match=says):
        await batcher.check_health(lambda: None)
    with pytest.raises(Unavailable):
        await ask(batcher, [3])
    doubler.gate.set()


async def test_a_run_that_says_that_its_model_hangs_answers_everyone() -> None:
    async def run(items: Sequence[int]) -> list[int]:
        raise HungError("taste has run for longer than batch_s, 20 s")

    batcher = make_batcher(run)
    for _ in range(2):
        with pytest.raises(Unavailable, match="will be replaced"):
            await ask(batcher, [1])
    with pytest.raises(RuntimeError, match=r"taste has run for longer than batch_s, 20 s; now \d+ s"):
        await batcher.check_health(lambda: None)


async def test_a_check_that_hangs_is_unhealthy(doubler: Doubler) -> None:
    def hang() -> None:
        doubler.gate.wait(5)

    batcher = make_batcher(doubler, check_s=0.05)
    with pytest.raises(TimeoutError):
        await batcher.check_health(hang)
    doubler.gate.set()


class Wrong(Numbers):
    def items(self, rows: Sequence[int]) -> list[int]:
        raise InvalidArgument("too long")


def test_an_idle_model_is_tested_ten_seconds_after_its_last_answer(
    doubler: Doubler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass and a test are answers; a pass that fails is none, nor is one whose input never came to the model."""
    doubler.gate.set()
    loop, tests = VirtualLoop(), list[float]()
    monkeypatch.setattr("quartet.serving.batcher.time", SimpleNamespace(monotonic=loop.time))

    async def run(items: Sequence[int]) -> list[int]:
        if items == [9]:
            raise RuntimeError("the model fails")
        return [2 * item for item in items]

    async def tested_at(*times: float) -> list[float]:
        tests.clear()
        for loop.now in times:
            await batcher.check_health(lambda: tests.append(loop.now))
        return tests

    async def all_of_it() -> None:
        assert await tested_at(0, 2, 9, 10, 12, 19, 20) == [0, 10, 20]
        loop.now = 25
        assert await ask(batcher, [1]) == [2]
        await settled()
        assert await tested_at(30, 34, 35, 37) == [35]
        with pytest.raises(RuntimeError, match="the model fails"):
            await ask(batcher, [9])
        await settled()
        assert await tested_at(38, 40) == [38]
        loop.now = 47
        with pytest.raises(InvalidArgument):
            await batcher.submit(share(), Wrong([1]))
        await settled()
        assert await tested_at(48) == [48]

    batcher = make_batcher(run)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(all_of_it())
