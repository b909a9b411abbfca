"""The part of an engine that callers outside of a run have while the run holds it."""

import pytest

from quartet.serving.guests import LONGEST_S, PASSAGE_S, SAVED_S, Guests
from tests.unit.fake_clock import Clock

COUNT = 64


class Held:
    """Guests of an engine whose run may end."""

    def __init__(self, share: float, *, gpus: float = 0.5) -> None:
        self.held, self.clock = True, Clock()
        self.guests = Guests(share, lambda: self.held, gpus=gpus, clock=self.clock)

    def spend(self, seconds: float, foreign: int, rows: int) -> None:
        self.clock.now += seconds
        self.guests.pass_time(foreign, rows)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
@pytest.mark.parametrize(("foreign", "rows"), [(1, 1), (1, 64), (3, 4)])
def test_their_time_in_the_engine_is_their_share(share: float, foreign: int, rows: int) -> None:
    """Rows of 0.1 s, each started as soon as it may, among rows of the run's or alone."""
    made, theirs = Held(share), 0.0
    while made.clock.now < 10_000:
        if wait_s := made.guests.wait_s:
            made.spend(wait_s, 0, 8)
        assert made.guests.wait_s == pytest.approx(0, abs=1e-9)
        made.spend(0.1, foreign, rows)
        theirs += 0.1 * foreign / rows
    assert theirs / made.clock.now == pytest.approx(min(share, foreign / rows), rel=0.02)


@pytest.mark.parametrize(("gpus", "each_s"), [(0, PASSAGE_S), (0.5, 0)])
def test_a_row_also_costs_its_passage_where_the_engine_computes_on_the_cores(gpus: float, each_s: float) -> None:
    made, rows = Held(0.1, gpus=gpus), 0
    while made.clock.now < 1000:
        made.spend(made.guests.wait_s, 0, 8)
        made.guests.begin()
        made.spend(0.01, 1, 1)
        rows += 1
    assert rows * (0.01 + each_s) == pytest.approx(100, rel=0.02)


def test_little_is_saved_up() -> None:
    made = Held(0.05)
    made.spend(3600, 0, 8)
    made.spend(SAVED_S, 1, 1)
    assert made.guests.wait_s == pytest.approx(0, abs=0.3)
    made.spend(1, 1, 1)
    assert made.guests.wait_s == pytest.approx(19, abs=0.3)
    made.spend(1000, 1, 1)
    assert made.guests.wait_s == LONGEST_S


def test_without_a_run_and_without_a_limit_nothing_waits() -> None:
    for share, held in ((0.05, False), (1.0, True)):
        made = Held(share)
        made.held = held
        made.spend(100, 1, 1)
        assert (made.guests.wait_s, made.guests.most(COUNT, 1, 1)) == (0, COUNT)


def test_a_run_that_ends_leaves_no_debt() -> None:
    made = Held(0.05)
    made.spend(2, 1, 1)
    assert made.guests.wait_s > 30
    made.held = False
    made.spend(0.1, 0, 0)
    assert made.guests.wait_s == 0


def test_a_device_of_its_own_is_theirs_while_the_run_has_nothing_in_it() -> None:
    own, shared = Held(0.05, gpus=1), Held(0.05)
    for made in (own, shared):
        made.spend(2, 30, 30)
    assert (own.guests.wait_s, shared.guests.wait_s > 30) == (0, True)
    assert [made.guests.most(COUNT, 30, 30) for made in (own, shared)] == [COUNT, 4]
    own.spend(4, 30, 60)
    assert own.guests.wait_s > 30
    assert own.guests.most(COUNT, 30, 60) == 4
