"""Statistics, beside closed forms and beside other implementations."""

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest

from orchestrator.evaluation.statistics import bootstrap, compare, pass_at_k, sign_test, win_share


def binomial_quantile(n: int, p: float, probability: float) -> int:
    total = 0.0
    for count in range(n + 1):
        total += math.comb(n, count) * p**count * (1 - p) ** (n - count)
        if total >= probability:
            return count
    return n


@pytest.mark.parametrize(("n", "passed"), [(20, 10), (50, 20), (200, 12), (1000, 900)])
def test_a_bootstrap_of_zeros_and_ones_is_a_binomial(n: int, passed: int) -> None:
    """The number of ones in a resample follows a binomial distribution of n and passed / n, exactly."""
    interval = bootstrap([1.0] * passed + [0.0] * (n - passed))
    assert interval.mean == passed / n
    bounds = [binomial_quantile(n, passed / n, probability) / n for probability in (0.025, 0.975)]
    # One count off, and in a large sample a tenth of a deviation, as ten thousand resamples leave it.
    error = max(1 / n, 0.1 * math.sqrt(passed / n * (1 - passed / n) / n)) + 1e-9
    assert [interval.low, interval.high] == pytest.approx(bounds, abs=error)


def test_a_bootstrap_of_many_values_is_normal() -> None:
    values = np.random.default_rng(1).normal(3, 2, 1000)  # all different: means are taken in several parts
    interval = bootstrap(values.tolist())
    half = NormalDist().inv_cdf(0.975) * values.std() / math.sqrt(1000)
    assert interval.mean == pytest.approx(values.mean())
    assert [interval.mean - interval.low, interval.high - interval.mean] == pytest.approx([half, half], rel=0.05)


def test_a_bootstrap_agrees_with_resampling_by_hand() -> None:
    generator = np.random.default_rng(5)
    values = generator.exponential(1.0, 37).round(1)  # skewed, with values that come several times
    means = [generator.choice(values, len(values)).mean() for _ in range(20_000)]
    interval = bootstrap(values.tolist())
    assert [interval.low, interval.high] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.015)


def test_a_bootstrap_does_not_depend_on_the_order_or_on_the_moment() -> None:
    values = np.random.default_rng(3).normal(0, 1, 100).tolist()
    assert bootstrap(values) == bootstrap(values[::-1]) == bootstrap(values)


def test_a_bootstrap_without_spread_or_with_one_value() -> None:
    same = bootstrap([0.5] * 9)
    assert (same.mean, same.low, same.high) == (0.5, 0.5, 0.5)
    alone = bootstrap([2.0])
    assert alone.mean == 2
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_a_bootstrap_refuses_what_has_none(values: list[float]) -> None:
    with pytest.raises(ValueError, match="should"):
        bootstrap(values)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_one_that_passes(n: int) -> None:
    for passed in range(n + 1):
        responses = [True] * passed + [False] * (n - passed)
        for k in range(1, n + 1):
            subsets = list(combinations(responses, k))
            assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_agrees_with_the_authors_program() -> None:
    """arXiv:2107.03374, figure 3."""
    for n, c, k in [(200, 7, 1), (200, 7, 10), (200, 7, 100), (200, 150, 100), (1000, 1, 999)]:
        theirs = 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
        assert pass_at_k(n, c, k) == pytest.approx(theirs)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="should be"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(5, 0, 2 / 32), (0, 5, 2 / 32), (8, 1, 2 * (1 + 9) / 512), (4, 4, 1.0), (4, 5, 1.0), (0, 0, 1.0), (1, 0, 1.0)],
)
def test_the_sign_test_by_hand(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)


@pytest.mark.parametrize(("better", "worse"), [(60, 40), (530, 470), (1000, 1010), (1500, 100)])
def test_the_sign_test_in_whole_numbers(better: int, worse: int) -> None:
    tosses, fewer = better + worse, min(better, worse)
    exact = 2 * sum(math.comb(tosses, count) for count in range(fewer + 1)) / 2**tosses
    assert sign_test(better, worse) == pytest.approx(min(1.0, exact), rel=1e-9)


def test_the_share_of_pairs_that_win() -> None:
    assert win_share([2.0, 0.0], [1.0]) == 0.5
    assert win_share([1.0], [1.0, 1.0]) == 0.5
    assert win_share([3.0, 1.0], [1.0, 0.0]) == (1 + 1 + 0.5 + 1) / 4
    # Rounding is no difference, whatever the size of the scores.
    assert win_share([0.1 + 1e-7, 1e4 + 0.01, -2.0], [0.1]) == (0.5 + 1 + 0) / 3
    assert win_share([1e4 + 0.01], [1e4]) == 0.5
    assert win_share([0.001], [0.0]) == 1.0


def test_a_comparison_by_hand() -> None:
    pairs = [([2.0], [1.0]), ([2.0, 2.0], [1.0, 1.0]), ([0.0], [0.0]), ([5.0], [1.0]), ([0.0], [100.0])]
    compared = compare(pairs)
    assert (compared.prompts, compared.better, compared.worse) == (5, 3, 1)
    assert compared.wins.mean == (1 + 1 + 0.5 + 1 + 0) / 5
    assert compared.difference.mean == (1 + 1 + 0 + 4 - 100) / 5
    assert compared.p == pytest.approx(2 * (1 + 4) / 16)
    # Of scores only their order counts in the test and the rate, whatever the scale of the scorer.
    stretched = compare([([math.exp(score) for score in a], [math.exp(score) for score in b]) for a, b in pairs])
    assert (stretched.wins, stretched.p) == (compared.wins, compared.p)


def test_a_comparison_takes_a_prompts_two_sides_together() -> None:
    """A difference that every prompt has is certain, however much prompts differ."""
    compared = compare([([float(10 * prompt + 1)], [float(10 * prompt)]) for prompt in range(20)])
    assert (compared.difference.low, compared.difference.high) == pytest.approx((1.0, 1.0))
    assert compared.p == pytest.approx(2 / 2**20)
