"""orchestrator.ppo against hand-computed values, the slow reference, and the laws it must obey."""

import math
from dataclasses import FrozenInstanceError
from typing import Any, get_args

import pytest
import reference_ppo as ref
import torch
from reference_ppo import close
from torch import Tensor

from orchestrator import ppo
from services.common.numerics import response_mask

NAN = math.nan
SEEDS = range(5)
LN2 = math.log(2)


def doubles(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


# KL ---------------------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand() -> None:
    # log r = -ln 2, r = 1/2: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2. Then log r = ln 2, r = 2.
    logprobs, ref_logprobs = doubles([[-1.0, -3.0]]), doubles([[-1.0 - LN2, -3.0 + LN2]])
    close(ppo.kl_estimate(logprobs, ref_logprobs, "k1"), [[0.693147, -0.693147]], 1e-6)
    close(ppo.kl_estimate(logprobs, ref_logprobs, "k2"), [[0.240227, 0.240227]], 1e-6)
    close(ppo.kl_estimate(logprobs, ref_logprobs, "k3"), [[0.193147, 0.306853]], 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", get_args(ppo.KLKind))
def test_kl_estimates_against_the_reference(seed: int, kind: ppo.KLKind) -> None:
    lengths = ref.random_lengths(seed)
    pi, base = ref.random_rows(seed, lengths), ref.random_rows(seed + 10, lengths)
    leaf, mask = ref.pad(pi).requires_grad_(), ref.mask_of(pi)
    estimate = ppo.kl_estimate(leaf, ref.pad(base), kind, mask)
    pairs = [zip(*rows, strict=True) for rows in zip(pi, base, strict=True)]
    close(estimate, ref.pad([[ref.kl(x, y, kind) for x, y in row] for row in pairs], fill=0.0))
    assert torch.equal(estimate[mask], ppo.kl_estimate(leaf, ref.pad(base), kind, None)[mask])
    assert (gradient(estimate.sum(), leaf)[~mask] == 0).all()


def test_kl_estimates_of_samples_average_to_the_kl() -> None:
    torch.manual_seed(0)
    log_pi, log_ref = torch.randn(2, 8, dtype=torch.float64).mul(0.5).log_softmax(-1)
    true = float((log_pi.exp() * (log_pi - log_ref)).sum())
    tokens = torch.multinomial(log_pi.exp(), 1_000_000, replacement=True).unsqueeze(0)
    k1, k2, k3 = (ppo.kl_estimate(log_pi[tokens], log_ref[tokens], k) for k in get_args(ppo.KLKind))
    for unbiased in (k1, k3):
        standard_error = float(unbiased.std()) / 1000
        assert abs(float(unbiased.mean()) - true) < 4 * standard_error < 0.05 * true
    assert abs(float(k2.mean()) / true - 1) < 0.2  # biased
    assert (k3 >= 0).all()
    assert k3.std() < k1.std()
    assert (k1 < 0).any()


def test_kl_gradients_in_expectation_are_those_documented() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    log_pi, log_ref = logits.log_softmax(-1), torch.randn(6, dtype=torch.float64).log_softmax(-1)
    reverse = gradient((log_pi.exp() * (log_pi - log_ref)).sum(), logits)
    forward = gradient((log_ref.exp() * (log_ref - logits.log_softmax(-1))).sum(), logits)
    expected: dict[ppo.KLKind, Tensor] = {"k1": torch.zeros(6), "k2": reverse, "k3": forward}
    for kind, wanted in expected.items():
        log_pi = logits.log_softmax(-1)
        estimate = ppo.kl_estimate(log_pi.unsqueeze(0), log_ref.unsqueeze(0), kind)[0]
        close(gradient((log_pi.detach().exp() * estimate).sum(), logits), wanted)
    assert float((reverse - forward).abs().max()) > 0.1


def test_kl_of_far_apart_log_probs_is_finite() -> None:
    leaf = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    k3 = ppo.kl_estimate(leaf, torch.tensor([[0.0, -500.0]]), "k3")
    close(k3, [[math.exp(20) - 1 - 500, -1.0 + 500]], 1e-6)
    close(gradient(k3.sum(), leaf), [[1.0, 1.0]])  # through log r alone


def test_tiny_kl_is_not_lost_and_never_negative() -> None:
    delta = torch.logspace(-7, 1, 2000).unsqueeze(0)  # float32
    for sign in (1, -1):
        k3 = ppo.kl_estimate(torch.zeros_like(delta), sign * delta, "k3")
        assert (k3 >= 0).all()
        close(k3[0, 1000], 0.5e-6, 0.01)  # delta = 1e-3: delta^2 / 2, where exp(delta) - 1 - delta is all noise


def test_an_unknown_kl_names_the_choices() -> None:
    kind: Any = "k4"
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3', got 'k4'"):
        ppo.kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), kind)


def test_kl_controllers_by_hand() -> None:
    assert ppo.FixedKL(0.1).update(kl=99.0, samples=128) == ppo.FixedKL(0.1)
    start = ppo.AdaptiveKL(coef=0.2, target=6.0, horizon=10_000)
    # error 9 / 6 - 1 = 0.5, clipped to 0.2: 0.2 * (1 + 0.2 * 256 / 10000) = 0.2 * 1.00512
    # error 5.4 / 6 - 1 = -0.1: 0.2 * 0.99744; error -1, clipped to -0.2: 0.2 * 0.99488; error 0
    for kl, coef in ((9.0, 0.201024), (5.4, 0.199488), (0.0, 0.198976), (6.0, 0.2)):
        close(start.update(kl, 256).coef, coef)
    assert start.coef == 0.2
    with pytest.raises(FrozenInstanceError):
        start.coef = 1.0  # type: ignore[misc]


def test_the_adaptive_coefficient_brings_the_kl_to_its_target() -> None:
    controller = ppo.AdaptiveKL(coef=0.01, target=4.0, horizon=1000)
    for _ in range(200):
        controller = controller.update(kl=1 / controller.coef, samples=256)  # more penalty, less KL
    close(controller.coef, 1 / 4, 1e-3)


@pytest.mark.parametrize("field", ["coef", "target", "horizon"])
@pytest.mark.parametrize("value", [0.0, -1.0, NAN, math.inf])
def test_kl_controllers_refuse_bad_numbers(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be > 0"):
        ppo.AdaptiveKL(**{"coef": 0.1, "target": 6.0, "horizon": 100.0} | {field: value})
    controller = ppo.AdaptiveKL(0.1, 6.0, 100.0)
    with pytest.raises(ValueError, match=r"horizon must be > 0\.2 \* 500 samples, got 100"):
        controller.update(6.0, 500)
    with pytest.raises(ValueError, match="kl must be finite"):
        controller.update(NAN, 1)
    with pytest.raises(ValueError, match="coef must be >= 0"):
        ppo.FixedKL(-0.1)


# Rewards and scores -----------------------------------------------------------------------------------------


def test_rewards_by_hand() -> None:
    kl, scores = doubles([[0.1, 0.2, 0.3], [0.4, NAN, NAN]]), doubles([1.0, -7.0])
    mask = response_mask(torch.tensor([3, 1]), 3)
    # -0.5 kl, and 1 at token 2 of the first; -7 clipped to -5 at token 0 of the second
    rewards = ppo.shape_rewards(scores, kl, mask, kl_coef=0.5, clip=5.0)
    close(rewards, [[-0.05, -0.1, 0.85], [-5.2, 0.0, 0.0]])
    assert float(ppo.shape_rewards(scores, kl, mask, kl_coef=0.5, clip=None)[1, 0]) == -7.2
    gap = torch.tensor([[True, False, True], [True, True, False]])
    close(ppo.shape_rewards(scores, torch.zeros(2, 3), gap, kl_coef=1.0, clip=None), [[0, 0, 1], [0, -7, 0]])


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_against_the_reference(seed: int) -> None:
    kl = ref.random_rows(seed, ref.random_lengths(seed))
    scores = ref.random_rows(seed + 10, [len(kl)], scale=3.0)[0]
    args = (doubles(scores), ref.pad(kl), ref.mask_of(kl))
    for clip in (None, 2.0):
        rewards = ppo.shape_rewards(*args, kl_coef=0.3, clip=clip)
        close(rewards, ref.pad(ref.shape_rewards(scores, kl, 0.3, clip), fill=0.0))
    close(ppo.shape_rewards(*args, kl_coef=0.0, clip=None).sum(dim=1), doubles(scores))


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
        ppo.shape_rewards(torch.tensor(scores), torch.zeros(2, 2), mask, kl_coef=0.1, clip=clip)


def test_the_normaliser_by_hand() -> None:
    fresh = ppo.RunningNormaliser()
    one = fresh.update(torch.tensor([1.0]))
    for too_early in (fresh, one):
        close(too_early.normalise(torch.tensor([5.0, -5.0])), torch.tensor([5.0, -5.0]))
    three = one.update(torch.tensor([2.0, 4.0]))
    # mean 7/3, squares about it 42/9, variance 7/3; (4 - 7/3) / sqrt(7/3) = 1.091089
    assert three.count == 3
    close(three.mean, 7 / 3)
    close(three.m2, 42 / 9)
    close(three.normalise(torch.tensor([4.0, 7 / 3])), torch.tensor([1.091089, 0.0]), 1e-6)
    assert three.update(torch.empty(0)) == three
    assert fresh == ppo.RunningNormaliser(0, 0.0, 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_normaliser_in_parts_equals_the_statistics_of_the_whole(seed: int) -> None:
    rows = [[1e4 + x for x in row] for row in ref.random_rows(seed, ref.random_lengths(seed))]
    parts = ppo.RunningNormaliser()
    for row in rows:
        parts = parts.update(doubles(row))
    close(parts.mean, ref.mean(rows))
    close(parts.m2 / (parts.count - 1), ref.variance(rows), 1e-8)
    normal = parts.normalise(doubles(ref.flat(rows)))
    close(normal.mean(), 0.0, 1e-6)
    close(normal.std(), 1.0, 1e-6)


def test_equal_scores_normalise_to_zero_and_bad_ones_are_refused() -> None:
    normaliser = ppo.RunningNormaliser().update(torch.full((8,), 0.1))
    assert float(normaliser.normalise(torch.full((8,), 0.1)).abs().max()) < 1e-6
    with pytest.raises(ValueError, match="scores must be finite"):
        normaliser.update(torch.tensor([1.0, NAN]))


# Advantages -------------------------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    rewards, values = doubles([[1.0, 0.0, 2.0, NAN]]), doubles([[0.5, 0.4, 0.3, NAN]])
    mask = response_mask(torch.tensor([3]), 4)
    # deltas 1 + 0.9 * 0.4 - 0.5 = 0.86; 0.9 * 0.3 - 0.4 = -0.13; 2 - 0.3 = 1.7; gamma lambda = 0.45
    # A = 1.7; -0.13 + 0.45 * 1.7 = 0.635; 0.86 + 0.45 * 0.635 = 1.14575
    advantages, returns = ppo.gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5)
    close(advantages, [[1.14575, 0.635, 1.7, 0.0]])
    close(returns, [[1.64575, 1.035, 2.0, 0.0]])
    # bootstrap 1: last delta 1.7 + 0.9 = 2.6; A = 2.6; -0.13 + 0.45 * 2.6 = 1.04; 0.86 + 0.45 * 1.04 = 1.328
    advantages, _ = ppo.gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5, bootstrap=doubles([1.0]))
    close(advantages, [[1.328, 1.04, 2.6, 0.0]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)])
def test_gae_against_the_reference(seed: int, gamma: float, lam: float) -> None:
    rewards, values = (ref.random_rows(seed + k, ref.random_lengths(seed)) for k in (0, 10))
    ends = ref.random_rows(seed + 20, [len(values)])[0]
    args = (ref.pad(rewards), ref.pad(values), ref.mask_of(values))
    for bootstrap, tensor in (([0.0] * len(ends), None), (ends, doubles(ends))):
        expected = ref.pad(ref.gae(rewards, values, gamma, lam, bootstrap), fill=0.0)
        advantages, returns = ppo.gae(*args, gamma=gamma, gae_lambda=lam, bootstrap=tensor)
        close(advantages, expected)
        close(returns, expected + ref.pad(values, fill=0.0))


def test_gae_with_gamma_and_lambda_one_is_reward_to_go_less_value() -> None:
    rewards, values = (ref.random_rows(k, [9, 1, 5]) for k in range(2))
    to_go = ref.pad([[sum(row[t:]) for t in range(len(row))] for row in rewards], fill=0.0)
    args = (ref.pad(rewards), ref.pad(values), ref.mask_of(values))
    advantages, returns = ppo.gae(*args, gamma=1.0, gae_lambda=1.0)
    close(returns, to_go)
    close(advantages, to_go - ref.pad(values, fill=0.0))


def test_gae_steps_over_a_gap() -> None:
    gap = torch.tensor([[True, False, True, True, False]])
    rewards, values = doubles([[1.0, NAN, 0.0, 2.0, NAN]]), doubles([[0.5, NAN, 0.4, 0.3, NAN]])
    advantages, returns = ppo.gae(rewards, values, gap, gamma=0.9, gae_lambda=0.5)
    close(advantages, [[1.14575, 0.0, 0.635, 1.7, 0.0]])  # as by hand above
    close(returns, [[1.64575, 0.0, 1.035, 2.0, 0.0]])


def test_gae_refuses_bad_input() -> None:
    one, mask = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gamma must lie in 0\.\.1, got 1\.5"):
        ppo.gae(one, one, mask, gamma=1.5, gae_lambda=1.0)
    with pytest.raises(ValueError, match=r"gae_lambda must lie in 0\.\.1, got -0\.1"):
        ppo.gae(one, one, mask, gamma=1.0, gae_lambda=-0.1)
    with pytest.raises(ValueError, match=r"bootstrap is \[1\], should be \[2\]"):
        ppo.gae(one, one, mask, gamma=1.0, gae_lambda=1.0, bootstrap=torch.ones(1))
    with pytest.raises(ValueError, match=r"values is \[2\], should be \[2, 1\]"):
        ppo.gae(one, one[:, 0], mask, gamma=1.0, gae_lambda=1.0)


def test_whitening_by_hand() -> None:
    advantages, mask = doubles([[2.0, 4.0, NAN], [6.0, NAN, NAN]]), response_mask(torch.tensor([2, 1]), 3)
    # mean 4, unbiased variance (4 + 0 + 4) / 2 = 4
    close(ppo.whiten(advantages, mask), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], 1e-8)
    close(ppo.whiten(advantages, mask, shift_mean=False), [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]], 1e-8)
    same = ppo.whiten(torch.full((1, 7), 0.1), torch.ones(1, 7, dtype=torch.bool))
    assert float(same.abs().max()) < 1e-3  # nothing to tell apart, and no division by zero
    with pytest.raises(ValueError, match="at least two"):
        ppo.whiten(advantages, response_mask(torch.tensor([1, 0]), 3))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_against_the_reference(seed: int, shift_mean: bool) -> None:
    rows = [[5 + 3 * x for x in row] for row in ref.random_rows(seed, ref.random_lengths(seed))]
    mask = ref.mask_of(rows)
    white = ppo.whiten(ref.pad(rows), mask, shift_mean)
    close(white, ref.pad(ref.whiten(rows, shift_mean), fill=0.0))
    close(white[mask].var(), 1.0, 1e-6)
    if shift_mean:
        close(white[mask].mean(), 0.0)
    else:
        assert torch.equal(white[mask].sign(), ref.pad(rows)[mask].sign())


# The policy loss --------------------------------------------------------------------------------------------


def test_importance_weights_by_hand() -> None:
    behaviour = doubles([[-1.0, -1.0, -1.0, NAN]])
    old = doubles([[-1.0 + LN2, -1.0 - LN2, 800.0, NAN]]).requires_grad_()  # ratios 2, 1/2, beyond floats
    mask = response_mask(torch.tensor([3]), 4)
    weights = ppo.importance_weights(old, behaviour, mask, cap=1.5)
    close(weights, [[1.5, 0.5, 1.5, 1.0]])
    assert not weights.requires_grad
    close(ppo.importance_weights(old, behaviour, mask, cap=None), [[1.0, 1.0, 1.0, 1.0]])
    for cap in (0.5, -1.0, NAN):
        with pytest.raises(ValueError, match="cap must be >= 1"):
            ppo.importance_weights(old, behaviour, mask, cap=cap)


def test_mismatch_by_hand() -> None:
    behaviour, old = doubles([[-1.0, -2.0, NAN]]), doubles([[-1.0 + LN2, -2.0, NAN]])
    mask = response_mask(torch.tensor([2]), 3)
    # differences ln 2 and 0; k3 = (2 - 1 - ln 2) and 0; ratios 2 and 1
    found = ppo.mismatch(behaviour, old, mask, cap=1.5)
    expected = {"mean_abs": LN2 / 2, "max_abs": LN2, "kl": (1 - LN2) / 2, "capped": 0.5}
    assert found == pytest.approx(expected, rel=1e-6)
    assert ppo.mismatch(behaviour, old, mask, cap=None)["capped"] == 0
    with pytest.raises(ValueError, match="mask is empty"):
        ppo.mismatch(behaviour, old, torch.zeros_like(mask), cap=None)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_and_mismatch_against_the_reference(seed: int) -> None:
    old, behaviour = (ref.random_rows(seed + k, ref.random_lengths(seed)) for k in (0, 10))
    args = (ref.pad(old), ref.pad(behaviour), ref.mask_of(old))
    expected = ref.pad(ref.importance_weights(old, behaviour, 2.0), fill=1.0)
    close(ppo.importance_weights(*args, cap=2.0), expected)
    found = ppo.mismatch(args[1], args[0], args[2], cap=2.0)
    assert found == pytest.approx(ref.mismatch(behaviour, old, 2.0), rel=1e-6)


CLIPS: dict[str, Any] = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def test_policy_loss_by_hand() -> None:
    old = doubles([[-2.0, -2.0, -2.0], [-2.0, NAN, NAN]])
    new = old + doubles([[1.5, 0.5, 0.5], [4.0, NAN, NAN]]).log()
    advantages = doubles([[1.0, 1.0, -2.0], [-1.0, NAN, NAN]])
    weights = doubles([[1.0, 2.0, 0.5], [1.0, NAN, NAN]])
    mask = response_mask(torch.tensor([3, 1]), 3)
    # objectives min(1.5, 1.28); min(0.5, 0.8); min(-1, -1.6); min(-4, -1.28), with dual clip 3 at least -3
    # weighted: 1.28 + 2 * 0.5 - 0.5 * 1.6 - 3 = -1.52, without the dual clip -2.52; denominator 8
    args = (new, old, advantages, mask)
    got = ppo.policy_loss(*args, **CLIPS, dual_clip=3.0, weights=weights, denominator=8)
    close(got.loss, 1.52 / 8)
    for share in (got.clip_fraction_low, got.clip_fraction_high, got.dual_clip_fraction):
        close(share, 1 / 8)
    # (0.5 - ln 1.5) + 2 (-0.5 + ln 2) + (3 - ln 4) = 0.094535 + 0.386294 + 1.613706 = 2.094535
    close(got.approx_kl, 2.094535 / 8, 1e-6)
    close(got.ratio_mean, 6.5 / 8)
    close(got.ratio_max, 4.0)
    plain = ppo.policy_loss(*args, **CLIPS, dual_clip=None, weights=weights, denominator=8)
    close(plain.loss, 2.52 / 8)
    assert plain.dual_clip_fraction == 0
    # unweighted: 1.28 + 0.5 - 1.6 - 4 = -3.82
    close(ppo.policy_loss(*args, **CLIPS, dual_clip=None, weights=None, denominator=8).loss, 3.82 / 8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual", [None, 1.7])
def test_policy_loss_and_gradient_against_the_reference(seed: int, dual: float | None) -> None:
    lengths = ref.random_lengths(seed)
    new, old, advantages, logw = (ref.random_rows(seed + 10 * k, lengths, scale=0.6) for k in range(4))
    weights = [[math.exp(x) for x in row] for row in logw]
    leaf, mask = ref.pad(new).requires_grad_(), ref.mask_of(new)
    args = (leaf, ref.pad(old), ref.pad(advantages), mask)
    got = ppo.policy_loss(*args, **CLIPS, dual_clip=dual, weights=ref.pad(weights), denominator=17.0)
    expected, slopes = ref.policy_loss(new, old, advantages, weights, (0.2, 0.28, dual), 17.0)
    found = dict(zip(("loss", "low", "high", "dual", "approx_kl", "ratio_mean", "ratio_max"), got, strict=True))
    assert {k: float(v.detach()) for k, v in found.items()} == pytest.approx(expected, rel=1e-6)
    assert all(not v.requires_grad for k, v in found.items() if k != "loss")
    close(
        gradient(got.loss, leaf),
        ref.pad([slopes], 0.0).new_zeros(mask.shape).masked_scatter(mask, doubles(slopes)),
    )


def test_the_reference_meets_every_bound() -> None:
    cases = [ref.objective(math.exp(r), a, 0.2, 0.28, 1.7)[1] for r in (-1.0, 0.0, 1.0) for a in (-1.0, 1.0)]
    assert set(cases) == {"low", "high", "dual", ""}


def test_policy_gradient_at_ratio_one_is_the_weighted_score_function() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids, mask = torch.randint(5, (2, 3)), response_mask(torch.tensor([3, 2]), 3)
    advantages, weights = torch.randn(2, 2, 3, dtype=torch.float64)
    logp = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    args = (logp, logp.detach(), advantages, mask)
    loss = ppo.policy_loss(*args, **CLIPS, dual_clip=3.0, weights=weights.abs(), denominator=5).loss
    # grad log softmax = onehot - p, so d loss / d logits = -w A (onehot - p) / 5 in the mask
    onehot = torch.nn.functional.one_hot(ids, 5)
    per_token = (weights.abs() * advantages * mask / 5).unsqueeze(-1)
    close(gradient(loss, logits), -per_token * (onehot - logits.softmax(-1)).detach())


def test_policy_loss_passes_gradcheck() -> None:
    torch.manual_seed(0)
    new = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    old, advantages = torch.randn(2, 3, 4, dtype=torch.float64)
    mask = response_mask(torch.tensor([4, 2, 1]), 4)
    options = CLIPS | {"dual_clip": 2.0, "weights": None, "denominator": 7}
    assert torch.autograd.gradcheck(lambda x: ppo.policy_loss(x, old, advantages, mask, **options).loss, new)
    for kind in get_args(ppo.KLKind):
        assert torch.autograd.gradcheck(lambda x, k=kind: ppo.kl_estimate(x, old, k, mask), new)


def test_policy_loss_adds_up_over_micro_batches() -> None:
    torch.manual_seed(0)
    old, advantages, noise, logw = torch.randn(4, 8, 6, dtype=torch.float64)
    leaf = (old + 0.5 * noise).requires_grad_()
    mask = response_mask(torch.tensor([6, 1, 0, 3, 2, 5, 4, 6]), 6)

    def part(rows: slice) -> ppo.PolicyLoss:
        args = (leaf[rows], old[rows], advantages[rows], mask[rows])
        weights = logw[rows].exp()
        return ppo.policy_loss(*args, **CLIPS, dual_clip=1.5, weights=weights, denominator=mask.sum())

    whole = part(slice(None))
    parts = [part(slice(*rows)) for rows in ((0, 2), (2, 3), (3, 8))]  # the second has no token
    for name in set(ppo.PolicyLoss._fields) - {"ratio_max"}:
        assert getattr(whole, name) != 0
        close(sum(getattr(p, name) for p in parts), getattr(whole, name), 1e-6)
    assert max(p.ratio_max for p in parts) == whole.ratio_max
    close(sum(gradient(p.loss, leaf) for p in parts), gradient(whole.loss, leaf))


def test_the_dual_clip_bites_only_at_negative_advantages() -> None:
    ratio = torch.linspace(0.1, 10, 100, dtype=torch.float64)
    for advantage in (2.0, 0.0, -2.0):
        advantages = torch.full_like(ratio, advantage)
        plain, dual = (ppo.surrogate(ratio, advantages, 0.2, 0.2, c) for c in (None, 3.0))
        assert torch.equal(plain != dual, (ratio > 3) & (advantages < 0))
    assert float(dual.min()) == -6.0


def test_log_probs_gone_astray_leave_the_loss_finite() -> None:
    new = torch.tensor([[900.0, -900.0, 0.0]], requires_grad=True)
    old, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        options = CLIPS | {"dual_clip": None, "weights": None, "denominator": 3}
        got = ppo.policy_loss(new, old, torch.full((1, 3), sign), mask, **options)
        assert all(x.isfinite() for x in got)
        close(gradient(got.loss, new), [[0.0, 0.0, -sign / 3]], 1e-6)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("clip_eps_low", 0.0, "clip_eps_low must lie in"),
        ("clip_eps_low", 1.1, "clip_eps_low must lie in"),
        ("clip_eps_high", -0.1, "clip_eps_high be > 0"),
        ("dual_clip", 1.0, "dual_clip must be > 1"),
        ("weights", torch.ones(2), r"weights is \[2\], should be \[1, 2\]"),
        ("denominator", 0, "denominator must be"),
    ],
)
def test_policy_loss_refuses_bad_input(option: str, value: Any, message: str) -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    options = CLIPS | {"dual_clip": None, "weights": None, "denominator": 1} | {option: value}
    with pytest.raises(ValueError, match=message):
        ppo.policy_loss(x, x, x, mask, **options)
