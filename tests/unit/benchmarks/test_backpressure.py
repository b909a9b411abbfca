"""The arithmetic of benchmarks/backpressure."""

import math

from benchmarks.backpressure import Look, Stretch, described


def test_a_stretch_counts_what_fell_into_it() -> None:
    looks = [Look(0, 900, 90), Look(1, 100, 16), Look(2, 104, 32), Look(3, 101, 0), Look(4, 900, 90)]
    lines = [{"at": at, "seconds/wall": wall} for at, wall in ((0.5, 9.0), (1.5, 2.0), (3.5, 3.0), (4.0, 9.0))]
    stretch = Stretch.of(looks, lines, 1, 4)
    assert stretch == Stretch(mib=101, most_mib=104, in_flight=32, step_s=2.5, steps=2)
    assert described(stretch, 32, sent=3) == ["101.0", "104.0", "32", "32", "2.50", "2", "1.50"]


def test_a_stretch_without_a_step_has_no_pace() -> None:
    assert math.isnan(Stretch.of([Look(1, 100, 0)], [], 0, 2).step_s)
