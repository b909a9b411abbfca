"""Statistics of scores: bootstrap intervals over prompts, pass@k, and paired comparisons. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.evaluation.intervals import UPPER, Interval

RESAMPLES = 10_000
"""Resamples of a bootstrap, fewer where there are so many different values that they would take minutes."""
TIE = 1e-5
"""Scores tie that differ by no more than this share of the larger, or of 1: by so much a model's score of a text may
differ by rounding, with the texts that it is scored beside."""
_FEWEST, _MOST_DRAWS, _AT_ONCE = 1_000, 1 << 28, 1 << 22


@dataclass(frozen=True, slots=True)
class Comparison:
    """A and B compared on the same prompts."""

    prompts: int
    """Number of prompts that have a score of both."""
    wins: Interval
    """Win rate of A: mean over prompts of the share of pairs of a response of A and one of B in which A's scores
    higher, a tie counting one half."""
    difference: Interval
    """Mean over prompts of A's mean score less B's."""
    better: int
    """Number of prompts on which A wins more than half of the pairs."""
    worse: int
    """Number of prompts on which B does."""
    p: float
    """Two-sided p-value of the sign test of `better` and `worse`."""


def bootstrap(values: Sequence[float]) -> Interval:
    """The mean and its 95 % percentile interval by the bootstrap (Efron and Tibshirani 1993, An Introduction to the
    Bootstrap, chapter 13): bounds are quantiles of the means of samples drawn from the values with replacement.

    Responses to one prompt are not independent: give a number for each prompt, [P]. The same values give the same
    bounds, in any order. One value alone has no bounds.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("values: should be finite numbers, at least one")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    # How often each different value is drawn follows a multinomial distribution: a thousand zeros and ones cost two
    # draws for a resample, not a thousand.
    different, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    number = min(RESAMPLES, max(_FEWEST, _MOST_DRAWS // len(different)))
    means: NDArray[np.float64] = np.empty(number)
    generator, step = np.random.default_rng(0), max(1, _AT_ONCE // len(different))
    for begin in range(0, number, step):
        end = min(begin + step, number)
        drawn = generator.multinomial(len(values), counts / len(values), size=end - begin)
        means[begin:end] = drawn @ different / len(values)
    low, high = np.quantile(means, [1 - UPPER, UPPER])
    return Interval(mean, float(low), float(high))


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """The unbiased estimate of the probability that one or more of k responses to a prompt pass, from n responses of
    which c passed: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Raises:
        ValueError: not 0 <= passed <= responses, or not 1 <= k <= responses.
    """
    if not 0 <= passed <= responses:
        raise ValueError(f"passed: should be 0 to {responses}, got {passed}")
    if not 1 <= k <= responses:
        raise ValueError(f"k: should be 1 to {responses}, the number of responses, got {k}")
    return 1 - math.comb(responses - passed, k) / math.comb(responses, k)


def win_share(scores: Sequence[float], others: Sequence[float]) -> float:
    """The share of all pairs of one of `scores`, [m], and one of `others`, [n], in which the first is greater; a tie
    counts one half. Scores that differ by less than TIE tie."""
    first, second = np.asarray(scores, np.float64)[:, None], np.asarray(others, np.float64)[None]
    tied = np.abs(first - second) <= TIE * np.maximum(1, np.maximum(np.abs(first), np.abs(second)))
    return float(np.mean(np.where(tied, 0.5, first > second)))


def sign_test(better: int, worse: int) -> float:
    """The two-sided p-value of the sign test: the probability that of `better` + `worse` fair coins so few, or fewer,
    show the rarer side, twice, and at most 1. Ties are left out (Conover 1999, Practical Nonparametric Statistics,
    section 3.4). No coins at all give 1."""
    tosses, fewer = better + worse, min(better, worse)
    if 2 * fewer >= tosses:
        return 1.0
    # Binomial terms from the largest down, each from the one before it, until they add nothing.
    log = math.lgamma(tosses + 1) - math.lgamma(fewer + 1) - math.lgamma(tosses - fewer + 1) - tosses * math.log(2)
    term = total = math.exp(log)
    for count in range(fewer, 0, -1):
        term *= count / (tosses - count + 1)
        total += term
        if term < 1e-18 * total:
            break
    return min(1.0, 2 * total)


def compare(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Comparison:
    """A against B, from the scores of A's responses and of B's to each prompt, [P] pairs of one or more numbers.

    The test is the sign test over prompts: of scores it reads only which of two is the higher, so that neither a
    scorer's scale nor a few extreme scores decide, and it is exact for any number of prompts. The size of the
    difference is in the bootstrap's interval of `difference`, whose resamples take a prompt's two sides together.

    Raises:
        ValueError: no pairs, or a score that is not finite.
    """
    shares = [win_share(ours, theirs) for ours, theirs in pairs]
    differences = [float(np.mean(ours)) - float(np.mean(theirs)) for ours, theirs in pairs]
    better, worse = sum(share > 0.5 for share in shares), sum(share < 0.5 for share in shares)
    return Comparison(
        prompts=len(pairs),
        wins=bootstrap(shares),
        difference=bootstrap(differences),
        better=better,
        worse=worse,
        p=sign_test(better, worse),
    )
