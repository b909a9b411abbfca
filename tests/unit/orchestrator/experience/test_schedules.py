"""Random schedules of delays, failures and kills: what benchmarks.staleness counts, on fewer of them."""

import asyncio

import pytest

from benchmarks.staleness.schedule import STEPS, Outcome, run
from tests.unit.virtual_time import Stuck, VirtualLoop


def outcomes(seeds: range) -> list[Outcome]:
    done = [run(seed) for seed in seeds]
    assert [seed for seed, outcome in zip(seeds, done, strict=True) if outcome.faults] == []
    return done


def test_no_sample_is_too_old_discarded_lost_or_doubled() -> None:
    done = outcomes(range(40))
    assert sum(outcome.restarts for outcome in done) > 40  # each was killed or failed once and more, on average
    assert {outcome.staleness for outcome in done} == {0, 1, 2, 3, 4}
    assert all(len(outcome.ages) % STEPS == 0 for outcome in done)
    for outcome in done:
        # Sampling that begins later than it was admitted is fresher, never older.
        assert sum(outcome.ages) <= sum(high for _, high in outcome.expected)


@pytest.mark.exhaustive  # the same as above, a minute of it
def test_no_sample_is_in_a_thousand_schedules() -> None:
    outcomes(range(40, 1040))


def test_the_same_seed_is_the_same_schedule() -> None:
    assert run(7) == run(7)


def test_a_loop_in_virtual_time_leaps_and_notices_that_it_hangs() -> None:
    async def leap() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    async def hang() -> None:
        await asyncio.Event().wait()

    loop = VirtualLoop(jumps=True)
    assert loop.run_until_complete(leap()) == pytest.approx(1e6)
    task = loop.create_task(hang())
    with pytest.raises(Stuck):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
