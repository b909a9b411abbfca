"""Callers whose rows spoil passes beside callers whose rows do not."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quartet.serving.batcher import SpoiltError
from quartet.serving.restraint import Restraint
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from tests.unit.batches import ask, make_batcher, share
from tests.unit.virtual_time import VirtualLoop
from tests.unit.waiting import settled, until

A, B, C = (share(name) for name in "abc")
HOUR = 3600.0


def seen(passes: int, *callers: Share) -> Restraint:
    made = Restraint(passes, HOUR)
    for each in callers:
        made.seen(each, 0.0)
    return made


def test_a_caller_whose_rows_spoil_nothing_is_not_held_up() -> None:
    restraint = seen(1, A, B, C)
    restraint.begins([A], 1.0)
    assert restraint.wait_s(A, 1.0) == 0
    assert not restraint.apart(A, 1.0)


@pytest.mark.parametrize(
    ("passes", "callers", "most"), [(4, [A], 4), (4, [A, B], 2), (6, [A, B, C], 2), (2, [A, B, C], 1), (1, [A, B], 1)]
)
def test_one_whose_rows_spoil_passes_has_its_part_of_them(passes: int, callers: list[Share], most: int) -> None:
    restraint = seen(passes, *callers)
    restraint.spoils(A, 0.0, 1.0)
    for _ in range(most):
        assert restraint.wait_s(A, 2.0) == 0
        restraint.begins([A], 2.0)
    assert restraint.wait_s(A, 2.0) == math.inf
    assert restraint.wait_s(B, 2.0) == 0
    restraint.ends([A], None)
    assert restraint.wait_s(A, 3.0) == 0


@pytest.mark.parametrize(("passes", "rest_s"), [(1, 20.0), (2, 5.0), (3, 0.0)])
def test_where_that_is_less_than_one_it_rests(passes: int, rest_s: float) -> None:
    """With three callers: of each 30 s of a pass ten are its own."""
    restraint = seen(passes, A, B, C)
    restraint.spoils(A, 10.0, 100.0)
    assert restraint.wait_s(A, 100.0) == rest_s
    assert restraint.wait_s(A, 100.0 + rest_s) == 0


def test_time_passes_and_higher_purposes_share_with_no_lower_ones() -> None:
    foreign = share("z", Purpose.FOREIGN)
    restraint = seen(2, A, foreign)
    for each in (A, foreign):
        restraint.spoils(each, 10.0, 1.0)
        restraint.begins([each], 1.0)
    assert (restraint.wait_s(A, 2.0), restraint.wait_s(foreign, 2.0)) == (0, math.inf)
    assert restraint.wait_s(foreign, 2 * HOUR) == 0


def test_callers_that_are_gone_are_forgotten() -> None:
    restraint = Restraint(1, 10.0)
    for number in range(1000):
        each = share(str(number))
        restraint.begins([each], float(number))
        restraint.spoils(each, 1.0, float(number))
        restraint.ends([each], 1.0)
    assert len(restraint._callers) <= 11


class Hangs:
    """Doubles numbers; a pass with a negative one takes until it is let go, and is spoilt."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.hung: list[list[int]] = []
        self.passes: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.passes.append([*items])
        if suspects := [at for at, item in enumerate(items) if item < 0]:
            self.hung.append([*items])
            await self.gate.wait()
            self.hung.remove([*items])
            raise SpoiltError("late", suspects[0])
        return [2 * item for item in items]


@pytest.mark.parametrize("others", [True, False])
async def test_rows_that_hang_leave_others_their_part_of_the_passes(others: bool) -> None:
    hangs = Hangs()

    async def run(items: Sequence[int]) -> list[int]:
        return await hangs(items)

    batcher = make_batcher(run, passes=4, batch_s=HOUR)
    if others:
        assert await ask(batcher, [1], B) == [2]
    first = asyncio.create_task(ask(batcher, [-1], A))
    await until(lambda: hangs.hung)
    hangs.gate.set()
    assert await first == ["late"]
    hangs.gate.clear()
    calls = [asyncio.create_task(ask(batcher, [-number] * 2, A, 50)) for number in range(1, 7)]
    await until(lambda: len(hangs.hung) == (2 if others else 4))
    await settled()
    assert len(hangs.hung) == (2 if others else 4)
    if others:
        for number in range(20):
            assert await asyncio.wait_for(ask(batcher, [number], B), 10) == [2 * number]
    hangs.gate.set()
    assert await asyncio.gather(*calls) == [["late"] * 2] * 6
    assert await ask(batcher, [5, 6], A) == [10, 12]


async def test_rows_of_others_do_not_wait_in_passes_with_those_that_hang() -> None:
    hangs = Hangs()

    async def run(items: Sequence[int]) -> list[int]:
        return await hangs(items)

    batcher = make_batcher(run, passes=2, batch_s=HOUR)
    busy = [asyncio.create_task(ask(batcher, [-number], C, 100)) for number in (1, 2)]
    await until(lambda: len(hangs.hung) == 2)
    mixed = [asyncio.create_task(ask(batcher, [number], whose)) for number, whose in [(-3, A), (4, B), (-5, A)]]
    await settled()
    hangs.gate.set()
    assert await asyncio.gather(*busy) == [["late"], ["late"]]
    assert await asyncio.gather(*mixed) == [["late"], [8], ["late"]]
    # Only the first pass with rows of A holds one of B too.
    assert sum(len({number > 0 for number in numbers}) > 1 for numbers in hangs.passes) == 1


def test_where_there_is_one_pass_at_a_time_the_next_one_is_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = VirtualLoop()
    monkeypatch.setattr("quartet.serving.batcher.time", SimpleNamespace(monotonic=loop.time))
    passes: list[list[int]] = []

    async def run(items: Sequence[int]) -> list[int]:
        passes.append([*items])
        if min(items) < 0:
            await asyncio.sleep(10)
            raise SpoiltError("late")
        return [2 * item for item in items]

    async def test() -> None:
        batcher = make_batcher(run, batch_s=HOUR)
        assert await ask(batcher, [1], B) == [2]
        late = [asyncio.create_task(ask(batcher, [number], A, 100)) for number in (-1, -2)]
        await until(lambda: passes == [[1], [-1]])
        waits = asyncio.create_task(ask(batcher, [3], B, 100))
        await settled()
        loop.now += 10
        assert await waits == [6]
        assert await late[0] == ["late"]
        loop.now += 9
        assert await ask(batcher, [4], B) == [8]
        await settled()
        assert passes == [[1], [-1], [3], [4]]
        loop.now += 2
        await until(lambda: passes[4:] == [[-2]])
        loop.now += 10
        assert await late[1] == ["late"]

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test())
