import math
from collections.abc import Sequence

import pytest

from orchestrator.evaluation.intervals import Interval, over_known, ratio_interval, student_t, win_rate


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    # From the tables of Student's distribution.
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.95, 2, 2.91999),
        (0.975, 3, 3.18245),
        (0.975, 4, 2.77645),
        (0.975, 9, 2.26216),
        (0.975, 29, 2.04523),
        (0.995, 9, 3.24984),
        (0.5, 3, 0.0),
    ],
)
def test_quantiles_of_student_t(probability: float, freedom: int, table: float) -> None:
    assert student_t(probability, freedom) == pytest.approx(table, rel=1.3e-3, abs=1e-9)


def mean_interval(values: Sequence[float]) -> Interval:
    """The interval of a value for each prompt."""
    interval = over_known(list(enumerate(values)))
    assert interval is not None
    return interval


def test_the_interval_of_a_mean() -> None:
    # s = sqrt(2.5), so the half width is 2.77645 · 1.58114 / sqrt(5) = 1.96324.
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert interval.low == pytest.approx(3 - 1.96324, rel=1e-3)
    assert interval.high == pytest.approx(3 + 1.96324, rel=1e-3)


def test_equal_values_have_an_interval_of_no_width_and_a_single_one_has_none() -> None:
    equal = mean_interval([2.5] * 4)
    assert (equal.mean, equal.low, equal.high) == (2.5, 2.5, 2.5)
    single = mean_interval([7.0])
    assert single.mean == 7.0
    assert math.isnan(single.low)
    assert math.isnan(single.high)


def test_win_rate_counts_a_tie_one_half() -> None:
    # 5 wins, 2 ties, 1 loss: p = 6/8. With z = 1.959964, z² = 3.841459 and n = 8:
    # centre = (0.75 + z²/16) / (1 + z²/8) = 0.990091 / 1.480182 = 0.668898,
    # half = 1.959964 / 1.480182 · sqrt(0.75 · 0.25 / 8 + z²/256) = 1.324137 · 0.196070 = 0.259624.
    interval = win_rate([1, 1, 1, 1, 1, 0, 0, -1], [0, 0, 0, 0, 0, 0, 0, 0])
    assert interval.mean == 0.75
    assert interval.low == pytest.approx(0.668898 - 0.259624, abs=2e-6)
    assert interval.high == pytest.approx(0.668898 + 0.259624, abs=2e-6)


def test_win_rate_without_a_win_still_has_an_upper_bound() -> None:
    # For 0 of n Wilson's bounds are 0 and z² / (n + z²) = 3.841459 / 13.841459.
    interval = win_rate([0.0] * 10, [1.0] * 10)
    assert interval.mean == 0
    assert interval.low == pytest.approx(0, abs=1e-12)
    assert interval.high == pytest.approx(0.277533, abs=1e-6)


def test_bad_input() -> None:
    for totals in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="totals: should be finite numbers, at least one"):
            ratio_interval(totals, [1] * len(totals))
    assert over_known([(0, math.nan)]) is None
