"""Means and win rates with their 95 % confidence intervals."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

UPPER = 0.975
"""Probability below the upper bound of an interval; all have 95 %."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval; the bounds are NaN where there can be none."""

    mean: float
    low: float
    high: float


def ratio_interval(totals: Sequence[float], counts: Sequence[int]) -> Interval:
    """Interval of the mean of numbers that come in groups of different sizes: sum of `totals` over sum of `counts`.

    Groups are independent, the numbers in one are not: the ratio's linearised variance (Cochran 1977, Sampling
    Techniques, eq. 6.13), with Student's t. Where all counts are 1 that is the usual interval of a mean. One group
    alone has no bounds. ValueError for no numbers, or one that is not finite.
    """
    if not len(totals) or not all(math.isfinite(total) for total in totals):
        raise ValueError("totals: should be finite numbers, at least one")
    size, number = sum(counts), len(totals)
    ratio = math.fsum(totals) / size
    if number == 1:
        return Interval(ratio, math.nan, math.nan)
    squares = sum((total - ratio * count) ** 2 for total, count in zip(totals, counts, strict=True))
    half = student_t(UPPER, number - 1) * math.sqrt(number / (number - 1) * squares) / size
    return Interval(ratio, ratio - half, ratio + half)


def over_known(values: Sequence[tuple[int, float]]) -> Interval | None:
    """Interval of the mean over prompts of each prompt's mean, from (prompt's row, value) pairs. Values that are not
    numbers are left out; None if that is all of them.

    Several responses to one prompt are not independent, so each prompt counts once.
    """
    by_row: defaultdict[int, list[float]] = defaultdict(list)
    for row, value in values:
        if math.isfinite(value):
            by_row[row].append(value)
    means = [fmean(group) for group in by_row.values()]
    return ratio_interval(means, [1] * len(means)) if means else None


def win_rate(after: Sequence[float], before: Sequence[float]) -> Interval:
    """The share of pairs in which `after` is greater, a tie counting one half, with Wilson's interval (1927).

    Raises:
        ValueError: no pairs, or unequal lengths.
    """
    n = len(after)
    share = fmean(0.5 * (a > b) + 0.5 * (a >= b) for a, b in zip(after, before, strict=True))
    z = NormalDist().inv_cdf(UPPER)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(share, centre - half, centre + half)


def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution with `freedom` >= 1 degrees of freedom.

    Exact for one and two degrees, else Abramowitz & Stegun 26.7.5, whose relative error is at most 0.13 % at
    probabilities up to 0.975 and 0.8 % up to 0.995.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * math.sqrt(1 / (2 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
