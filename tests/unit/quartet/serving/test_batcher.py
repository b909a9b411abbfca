"""Dynamic batching: calls that arrive while a pass computes are served by the next ones."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quartet.serving.batcher import SpoiltError
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument, Unavailable
from tests.unit.batches import Doubler, Numbers, ask, busy, make_batcher, queued, share
from tests.unit.virtual_time import VirtualLoop
from tests.unit.waiting import settled, until


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


async def test_calls_that_arrive_meanwhile_share_the_next_pass(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1, 2], [3], [4, 5])
    doubler.gate.set()
    assert await asyncio.gather(first, *others) == [[0], [2, 4], [6], [8, 10]]
    assert doubler.batches == [[0], [1, 2, 3, 4, 5]]
    assert len(doubler.threads) == 1
    assert threading.current_thread().name not in doubler.threads


async def test_an_idle_batcher_starts_at_once_every_time(doubler: Doubler) -> None:
    doubler.gate.set()
    batcher = make_batcher(doubler)
    assert [await ask(batcher, [item]) for item in (1, 2)] == [[2], [4]]
    assert doubler.batches == [[1], [2]]


async def test_a_large_call_is_cut_into_passes_between_which_others_have_their_turn(doubler: Doubler) -> None:
    batcher = make_batcher(doubler, batch_tokens=8)
    first = await busy(batcher, doubler)
    large = (await queued(batcher, list(range(10, 22)), whose=share("large"), tokens=2))[0]
    small = (await queued(batcher, [1, 2], whose=share("small"), tokens=2))[0]
    doubler.gate.set()
    assert list(await asyncio.gather(first, large, small)) == [[0], [2 * n for n in range(10, 22)], [2, 4]]
    assert [len(batch) for batch in doubler.batches] == [1, 4, 4, 4, 2]
    assert doubler.batches[1] == [10, 1, 11, 2]


async def test_a_row_that_is_longer_than_a_pass_comes_alone(doubler: Doubler) -> None:
    doubler.gate.set()
    batcher = make_batcher(doubler, batch_tokens=8)
    assert await ask(batcher, [1, 2, 3], tokens=50) == [2, 4, 6]
    assert doubler.batches == [[1], [2], [3]]


async def test_training_goes_first_and_computes_in_no_foreign_company(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    foreign = await queued(batcher, [1], whose=share("other", Purpose.FOREIGN))
    evaluation = await queued(batcher, [2], whose=share("run", Purpose.EVALUATION))
    training = await queued(batcher, [3], whose=share("run", Purpose.TRAINING))
    doubler.gate.set()
    await asyncio.gather(first, *foreign, *evaluation, *training)
    assert doubler.batches == [[0], [3], [2], [1]]


async def test_a_failing_call_costs_its_neighbours_a_logarithm_of_passes(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    others = await queued(batcher, *([n] for n in range(1, 14)), [14, -15], [16], [17])
    doubler.gate.set()
    await first
    answers = await asyncio.gather(*others, return_exceptions=True)
    assert [str(answer) for answer in answers] == [
        *(f"[{2 * n}]" for n in range(1, 14)),
        "negative: -15",
        "[32]",
        "[34]",
    ]
    # All 16 calls; then halves of 8, 4, 2 and 1 calls, two of each: nine passes and not seventeen.
    assert len(doubler.batches) == 1 + 1 + 8
    # And the batcher works on.
    assert await ask(batcher, [7]) == [14]


async def test_a_lone_failing_call_is_not_run_again(doubler: Doubler) -> None:
    doubler.gate.set()
    batcher = make_batcher(doubler)
    with pytest.raises(ValueError, match="negative: -1"):
        await ask(batcher, [-1])
    assert doubler.batches == [[-1]]


async def test_what_cannot_be_read_fails_alone_and_without_a_pass(doubler: Doubler) -> None:
    class Unreadable(Numbers):
        def items(self, rows: Sequence[int]) -> list[int]:
            raise InvalidArgument("texts[0]: has no tokens")

    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    wrong = asyncio.create_task(batcher.submit(share(), Unreadable([1])))
    right = (await queued(batcher, [2]))[0]
    doubler.gate.set()
    assert list(await asyncio.gather(first, right)) == [[0], [4]]
    with pytest.raises(InvalidArgument, match="has no tokens"):
        await wrong
    assert doubler.batches == [[0], [2]]


@pytest.mark.parametrize("spoilt", [{3}, {0}, {9}, {2, 3}, {1, 5, 8}, set(range(10))], ids=str)
async def test_rows_that_spoil_their_pass_have_their_own_result_and_all_others_theirs(spoilt: set[int]) -> None:
    """Ten rows of three calls in one pass; each pass in which it is divided has a deadline of its own."""
    passes: list[list[int]] = []

    def run(items: Sequence[int]) -> list[int]:
        passes.append(list(items))
        if wrong := spoilt & set(items):
            raise SpoiltError(f"spoilt with {len(wrong)}")
        return [2 * item for item in items]

    batcher = make_batcher(run)
    calls = [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]]
    answers = await asyncio.gather(*(ask(batcher, numbers) for numbers in calls))
    expected = [["spoilt with 1" if n in spoilt else 2 * n for n in numbers] for numbers in calls]
    assert list(answers) == expected
    assert all(passes.count([n]) == 1 for n in spoilt)
    batcher.check()
    assert await ask(batcher, [20]) == [40]


@pytest.mark.parametrize("calls", [[list(range(64))], [[n] for n in range(64)]], ids=["one call", "many calls"])
async def test_where_every_row_spoils_its_pass_slowly_no_row_is_looked_for(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass takes 3 s, by a clock of the test's, and no more than 10 s are spent on dividing."""
    now = 0.0
    monkeypatch.setattr("quartet.serving.batcher.time", SimpleNamespace(monotonic=lambda: now))
    spoils, passes = True, list[int]()

    def run(items: Sequence[int]) -> list[int]:
        nonlocal now
        now += 3
        passes.append(len(items))
        if spoils:
            raise SpoiltError("spoilt")
        return [2 * item for item in items]

    batcher = make_batcher(run)
    assert await asyncio.gather(*(ask(batcher, numbers) for numbers in calls)) == [["spoilt"] * len(n) for n in calls]
    # Divided three times, into four passes that hold all rows. Then none is divided, until one succeeds.
    assert (len(passes), passes[0], sum(passes[3:])) == (7, 64, 64)
    assert await ask(batcher, [1, 2, 3]) == ["spoilt"] * 3
    spoils = False
    assert await ask(batcher, [1, 2, 3]) == [2, 4, 6]
    spoils = True
    assert await ask(batcher, [1, 2, 3]) == ["spoilt"] * 3
    assert passes[7:] == [3, 3, 3, 1, 2, 1, 1]


async def test_an_error_that_is_not_of_single_rows_fails_the_whole_call() -> None:
    def run(items: Sequence[int]) -> list[int]:
        raise ValueError(f"{len(items)} items")

    batcher = make_batcher(run)
    for numbers in ([1, 2, 3], [1]):
        with pytest.raises(ValueError, match=f"{len(numbers)} items"):
            await ask(batcher, numbers)


async def test_results_of_the_wrong_number_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 results for 2 rows"):
        await ask(make_batcher(lambda items: [0]), [1, 2])


async def test_a_cancelled_call_is_dropped_before_its_pass_and_harmless_after(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1], [2], [3])
    others[1].cancel()
    first.cancel()
    await asyncio.wait([others[1], first])
    doubler.gate.set()
    assert list(await asyncio.gather(others[0], others[2])) == [[2], [6]]
    assert doubler.batches == [[0], [1, 3]]


async def test_a_call_without_rows_is_answered(doubler: Doubler) -> None:
    assert await asyncio.wait_for(ask(make_batcher(doubler), []), 10) == []
    assert doubler.batches == []


@pytest.mark.parametrize("death", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
async def test_what_would_end_a_thread_answers_its_callers(death: BaseException) -> None:
    def dies(items: Sequence[int]) -> list[int]:
        if 13 in items:
            raise death
        return list(items)

    batcher = make_batcher(dies)
    with pytest.raises(RuntimeError, match=type(death).__name__):
        await asyncio.wait_for(ask(batcher, [13]), 10)
    assert await ask(batcher, [1]) == [1]


async def test_a_coroutine_that_is_cancelled_answers_its_callers() -> None:
    async def run(items: Sequence[int]) -> list[int]:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled"):
        await asyncio.wait_for(ask(make_batcher(run), [1]), 10)


def test_the_deadline_begins_with_the_turn(doubler: Doubler, monkeypatch: pytest.MonkeyPatch) -> None:
    doubler.gate.set()
    loop = VirtualLoop()
    monkeypatch.setattr("quartet.serving.batcher.time", SimpleNamespace(monotonic=loop.time))

    async def late_turn() -> None:
        turn = asyncio.Lock()
        batcher = make_batcher(doubler, batch_s=10, turn=turn)
        async with turn:
            asked = asyncio.create_task(ask(batcher, [1]))
            await settled()
            loop.now += 100
            await settled()
            assert (doubler.batches, asked.done()) == ([], False)
            await batcher.check_health(lambda: None)
        assert await asked == [2]

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(late_turn())


async def test_a_batcher_that_is_stopped_answers_its_callers(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    [working] = batcher._working
    working.cancel()
    with pytest.raises(Unavailable, match="stops"):
        await first
    doubler.gate.set()
    await until(lambda: not batcher._working)
