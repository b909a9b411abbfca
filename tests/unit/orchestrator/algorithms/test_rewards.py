"""orchestrator.algorithms by hand, against the slow reference, and by its laws: KL, rewards, their normaliser."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from orchestrator.algorithms.contract import KLKind
from orchestrator.algorithms.kl import adapted, kl_estimate
from orchestrator.algorithms.rewards import RunningNormaliser, at_own_tokens, carry_back, shape_rewards
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import response_mask
from tests.unit.reference_ppo import close, doubles, gradient

NAN = math.nan
SEEDS = range(5)
LN2 = math.log(2)


def test_kl_estimates_by_hand() -> None:
    # log r = -ln 2, r = 1/2: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2. Then log r = ln 2, r = 2.
    logprobs, ref_logprobs = doubles([[-1.0, -3.0]]), doubles([[-1.0 - LN2, -3.0 + LN2]])
    close(kl_estimate(logprobs, ref_logprobs, "k1"), [[0.693147, -0.693147]], 1e-6)
    close(kl_estimate(logprobs, ref_logprobs, "k2"), [[0.240227, 0.240227]], 1e-6)
    close(kl_estimate(logprobs, ref_logprobs, "k3"), [[0.193147, 0.306853]], 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", get_args(KLKind))
def test_kl_estimates_against_the_reference(seed: int, kind: KLKind) -> None:
    lengths = ref.random_lengths(seed)
    pi, base = ref.random_rows(seed, lengths), ref.random_rows(seed + 10, lengths)
    leaf, mask = ref.pad(pi).requires_grad_(), ref.mask_of(pi)
    estimate = kl_estimate(leaf, ref.pad(base), kind, mask)
    pairs = [zip(*rows, strict=True) for rows in zip(pi, base, strict=True)]
    close(estimate, ref.pad([[ref.kl(x, y, kind) for x, y in row] for row in pairs], fill=0.0))
    assert torch.equal(estimate[mask], kl_estimate(leaf, ref.pad(base), kind, None)[mask])
    assert (gradient(estimate.sum(), leaf)[~mask] == 0).all()


def test_kl_gradients_in_expectation_are_those_documented() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    log_pi, log_ref = logits.log_softmax(-1), torch.randn(6, dtype=torch.float64).log_softmax(-1)
    reverse = gradient((log_pi.exp() * (log_pi - log_ref)).sum(), logits)
    forward = gradient((log_ref.exp() * (log_ref - logits.log_softmax(-1))).sum(), logits)
    expected: dict[KLKind, Tensor] = {"k1": torch.zeros(6), "k2": reverse, "k3": forward}
    for kind, wanted in expected.items():
        log_pi = logits.log_softmax(-1)
        estimate = kl_estimate(log_pi.unsqueeze(0), log_ref.unsqueeze(0), kind)[0]
        close(gradient((log_pi.detach().exp() * estimate).sum(), logits), wanted)
    assert float((reverse - forward).abs().max()) > 0.1


def test_kl_of_far_apart_log_probs_is_finite() -> None:
    leaf = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    k3 = kl_estimate(leaf, torch.tensor([[0.0, -500.0]]), "k3")
    close(k3, [[math.exp(20) - 1 - 500, -1.0 + 500]], 1e-6)
    close(gradient(k3.sum(), leaf), [[1.0, 1.0]])  # through log r alone


def test_tiny_kl_is_not_lost_and_never_negative() -> None:
    delta = torch.logspace(-7, 1, 2000).unsqueeze(0)  # float32
    for sign in (1, -1):
        k3 = kl_estimate(torch.zeros_like(delta), sign * delta, "k3")
        assert (k3 >= 0).all()
        close(k3[0, 1000], 0.5e-6, 0.01)  # delta = 1e-3: delta^2 / 2, where exp(delta) - 1 - delta is all noise


def test_an_unknown_kl_names_the_choices() -> None:
    kind: Any = "k4"
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3', got 'k4'"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), kind)


def test_an_adapted_coefficient_by_hand() -> None:
    # error 9 / 6 - 1 = 0.5, clipped to 0.2: 0.2 * (1 + 0.2 * 256 / 10000) = 0.2 * 1.00512
    # error 5.4 / 6 - 1 = -0.1: 0.2 * 0.99744; error -1, clipped to -0.2: 0.2 * 0.99488; error 0
    for kl, coef in ((9.0, 0.201024), (5.4, 0.199488), (0.0, 0.198976), (6.0, 0.2)):
        close(adapted(0.2, kl, 256, target=6.0, horizon=10_000), coef)


def test_the_adapted_coefficient_brings_the_kl_to_its_target() -> None:
    coef = 0.01
    for _ in range(200):
        coef = adapted(coef, 1 / coef, 256, target=4.0, horizon=1000)  # more penalty, less KL
    close(coef, 1 / 4, 1e-3)


def test_rewards_by_hand() -> None:
    kl, scores = doubles([[0.1, 0.2, 0.3], [0.4, NAN, NAN]]), doubles([1.0, -7.0])
    mask = response_mask(torch.tensor([3, 1]), 3)
    # -0.5 kl, and 1 at token 2 of the first; -7 clipped to -5 at token 0 of the second
    rewards = shape_rewards(scores, kl, mask, kl_coef=0.5, clip=5.0)
    close(rewards, [[-0.05, -0.1, 0.85], [-5.2, 0.0, 0.0]])
    assert float(shape_rewards(scores, kl, mask, kl_coef=0.5, clip=None)[1, 0]) == -7.2
    # The weight counts what the clip left: 3 times 1 and 3 times -5.
    weighted = shape_rewards(scores, torch.zeros(2, 3), mask, kl_coef=0.0, clip=5.0, weight=3.0)
    close(weighted, [[0, 0, 3], [-15, 0, 0]])
    gap = torch.tensor([[True, False, True], [True, True, False]])
    close(shape_rewards(scores, torch.zeros(2, 3), gap, kl_coef=1.0, clip=None), [[0, 0, 1], [0, -7, 0]])


@pytest.mark.parametrize(
    ("scores", "rows", "clip", "message"),
    [
        ([1.0, 2.0, 3.0], [1, 1], None, r"scores is \[3\], should be \[2\]"),
        ([1.0, NAN], [1, 1], None, "scores must be finite"),
        ([1.0, math.inf], [1, 1], 5.0, "scores must be finite"),
        ([1.0, 2.0], [1, 0], None, "row without a response token"),
        ([1.0, 2.0], [1, 1], 0.0, "clip must be > 0"),
    ],
)
def test_rewards_refuse_bad_input(scores: list[float], rows: list[int], clip: float | None, message: str) -> None:
    mask = response_mask(torch.tensor(rows), 2)
    with pytest.raises(ValueError, match=message):
        shape_rewards(torch.tensor(scores), torch.zeros(2, 2), mask, kl_coef=0.1, clip=clip)


def test_the_normaliser_by_hand() -> None:
    fresh = RunningNormaliser()
    one = fresh.update(torch.tensor([1.0]))
    for too_early in (fresh, one):
        close(too_early.normalise(torch.tensor([5.0, -5.0])), torch.tensor([5.0, -5.0]))
        assert too_early.deviation == 1
    three = one.update(torch.tensor([2.0, 4.0]))
    # mean 7/3, squares about it 42/9, variance 7/3; (4 - 7/3) / sqrt(7/3) = 1.091089
    assert three.count == 3
    close(three.mean, 7 / 3)
    close(three.m2, 42 / 9)
    close(three.normalise(torch.tensor([4.0, 7 / 3])), torch.tensor([1.091089, 0.0]), 1e-6)
    close(three.deviation, math.sqrt(7 / 3), 1e-6)
    assert three.update(torch.empty(0)) == three
    assert fresh == RunningNormaliser(0, 0.0, 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_normaliser_in_parts_equals_the_statistics_of_the_whole(seed: int) -> None:
    rows = [[1e4 + x for x in row] for row in ref.random_rows(seed, ref.random_lengths(seed))]
    parts = RunningNormaliser()
    for row in rows:
        parts = parts.update(doubles(row))
    close(parts.mean, ref.mean(rows))
    close(parts.m2 / (parts.count - 1), ref.variance(rows), 1e-8)
    normal = parts.normalise(doubles(ref.flat(rows)))
    close(normal.mean(), 0.0, 1e-6)
    close(normal.std(), 1.0, 1e-6)


def test_equal_scores_normalise_to_zero_and_bad_ones_are_refused() -> None:
    normaliser = RunningNormaliser().update(torch.full((8,), 0.1))
    assert float(normaliser.normalise(torch.full((8,), 0.1)).abs().max()) < 1e-6
    with pytest.raises(ValueError, match="scores must be finite"):
        normaliser.update(torch.tensor([1.0, NAN]))


def test_rewards_of_tokens_left_out_go_to_the_trained_one_before_by_hand() -> None:
    rewards = doubles([[1.0, 2.0, 4.0, 8.0, NAN], [1.0, 2.0, NAN, NAN, NAN]])
    sampled = response_mask(torch.tensor([4, 2]), 5)
    mask = torch.tensor([[True, False, True, False, False], [False, True, False, False, False]])
    close(carry_back(rewards, sampled, mask), [[3, 0, 12, 0, 0], [0, 2, 0, 0, 0]])
    close(carry_back(rewards, sampled, sampled), [[1, 2, 4, 8, 0], [1, 2, 0, 0, 0]])
    close(carry_back(rewards, sampled, torch.zeros_like(mask)), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"rewards is \[2, 5\], should be \[1, 5\]"):
        carry_back(rewards, sampled, mask[:1])


def test_parts_of_a_score_go_to_their_own_tokens() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 5.0], [-0.5, 3.0, torch.nan, torch.nan]])
    parts = torch.tensor([[0.0, 2.0, 0.0, 1.0], [4.0, 0.0, torch.nan, torch.nan]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    actual = at_own_tokens(torch.where(mask, rewards, 0.0), parts, mask)
    assert actual.tolist() == [[0.0, 2.0, 0.0, 3.0], [3.5, -1.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match="parts"):
        at_own_tokens(torch.zeros(2, 4), parts[:1], mask)
