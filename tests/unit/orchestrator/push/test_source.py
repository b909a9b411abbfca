"""The two sides of a collective wait for each other, and neither for one that has failed."""

import asyncio

import pytest

from orchestrator.push.source import both
from quartet.wire.errors import Internal, Unavailable
from tests.unit.virtual_time import in_virtual_time

REPLICAS, LEARNER = Unavailable("a: did not answer"), Internal("policy.send: broken pipe")


class Side:
    """One side, which ends after so many seconds with a result or an error; with neither it never ends."""

    def __init__(self, after_s: float, end: Exception | str | None = None) -> None:
        self.after_s, self.end = after_s, end
        self.cancelled = False

    async def carry_out(self) -> str:
        try:
            await asyncio.sleep(self.after_s)
            if self.end is None:
                return await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@in_virtual_time
async def test_both_results_are_given_however_far_apart_they_come() -> None:
    assert await both(Side(1, "reports").carry_out(), Side(90, "sum").carry_out()) == ("reports", "sum")


@in_virtual_time
@pytest.mark.parametrize(
    ("replicas", "learner", "error", "seconds"),
    [
        (Side(3, REPLICAS), Side(0), REPLICAS, 4),
        (Side(0), Side(3, LEARNER), LEARNER, 4),
        # Both fail: the replicas' error tells more, whichever comes first.
        (Side(3, REPLICAS), Side(3.5, LEARNER), REPLICAS, 3.5),
        (Side(3.5, REPLICAS), Side(3, LEARNER), REPLICAS, 3.5),
        # One that ends well in the time that it is given.
        (Side(3.5, "reports"), Side(3, LEARNER), LEARNER, 3.5),
    ],
)
async def test_a_side_that_fails_is_the_error_and_the_other_has_a_second_to_end(
    replicas: Side, learner: Side, error: Exception, seconds: float
) -> None:
    with pytest.raises(type(error)) as caught:
        await both(replicas.carry_out(), learner.carry_out())
    assert caught.value is error
    assert asyncio.get_running_loop().time() == seconds
    assert [side.cancelled for side in (replicas, learner)] == [side.end is None for side in (replicas, learner)]


async def test_a_caller_that_is_cancelled_leaves_no_side_behind() -> None:
    sides = Side(0), Side(0)
    waiting = asyncio.create_task(both(*(side.carry_out() for side in sides)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert [side.cancelled for side in sides] == [True, True]
