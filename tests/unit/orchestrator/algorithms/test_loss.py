"""The policy loss and its importance weights by hand, against the slow reference, and by their laws."""

import math
from typing import Any, get_args

import pytest
import torch

from orchestrator.algorithms.contract import Clip
from orchestrator.algorithms.loss import bound, importance_weights, mismatch, policy_loss
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import response_mask
from tests.unit.reference_ppo import close, doubles, gradient

NAN = math.nan
SEEDS = range(5)
LN2 = math.log(2)


def test_importance_weights_by_hand() -> None:
    behaviour = doubles([[-1.0, -1.0, -1.0, NAN]])
    old = doubles([[-1.0 + LN2, -1.0 - LN2, 800.0, NAN]]).requires_grad_()  # ratios 2, 1/2, beyond floats
    mask = response_mask(torch.tensor([3]), 4)
    weights = importance_weights(old, behaviour, mask, cap=1.5)
    close(weights, [[1.5, 0.5, 1.5, 1.0]])
    assert not weights.requires_grad
    close(importance_weights(old, behaviour, mask, cap=None), [[1.0, 1.0, 1.0, 1.0]])
    for cap in (0.5, -1.0, NAN):
        with pytest.raises(ValueError, match="cap must be >= 1"):
            importance_weights(old, behaviour, mask, cap=cap)


def test_mismatch_by_hand() -> None:
    behaviour, old = doubles([[-1.0, -2.0, NAN]]), doubles([[-1.0 + LN2, -3.0, NAN]])
    mask = response_mask(torch.tensor([2]), 3)
    # differences ln 2 and -1; k3 = (2 - 1 - ln 2) and (1 / e - 1 + 1); ratios 2 and 1 / e
    actual = mismatch(behaviour, old, mask, cap=1.5)
    expected = {"mean_abs": (LN2 + 1) / 2, "max_abs": 1.0, "kl": (1 - LN2 + math.exp(-1)) / 2, "capped": 0.5}
    assert actual == pytest.approx(expected, rel=1e-6)
    assert mismatch(behaviour, old, mask, cap=None)["capped"] == 0
    with pytest.raises(ValueError, match="mask is empty"):
        mismatch(behaviour, old, torch.zeros_like(mask), cap=None)


def ppo(dual: float | None) -> Any:
    """PPO's bound with these clips."""
    return bound("ppo", low=0.2, high=0.28, dual=dual)


def test_policy_loss_by_hand() -> None:
    old = doubles([[-2.0, -2.0, -2.0], [-2.0, NAN, NAN]])
    new = old + doubles([[1.5, 0.5, 0.5], [4.0, NAN, NAN]]).log()
    advantages = doubles([[1.0, 1.0, -2.0], [-1.0, NAN, NAN]])
    weights = doubles([[1.0, 2.0, 0.5], [1.0, NAN, NAN]])
    mask = response_mask(torch.tensor([3, 1]), 3)
    # objectives min(1.5, 1.28); min(0.5, 0.8); min(-1, -1.6); min(-4, -1.28), with dual clip 3 at least -3
    # weighted: 1.28 + 2 * 0.5 - 0.5 * 1.6 - 3 = -1.52, without the dual clip -2.52; denominator 8
    args = (new, old, advantages, mask)
    got = policy_loss(*args, bound=ppo(3.0), weights=weights, denominator=8)
    close(got.loss, 1.52 / 8)
    for share in (got.clip_fraction_low, got.clip_fraction_high, got.dual_clip_fraction):
        close(share, 1 / 8)
    # (0.5 - ln 1.5) + 2 (-0.5 + ln 2) + (3 - ln 4) = 0.094535 + 0.386294 + 1.613706 = 2.094535
    close(got.approx_kl, 2.094535 / 8, 1e-6)
    close(got.ratio_mean, 6.5 / 8)
    close(got.ratio_max, 4.0)
    plain = policy_loss(*args, bound=ppo(None), weights=weights, denominator=8)
    close(plain.loss, 2.52 / 8)
    assert plain.dual_clip_fraction == 0
    # unweighted: 1.28 + 0.5 - 1.6 - 4 = -3.82
    close(policy_loss(*args, bound=ppo(None), weights=None, denominator=8).loss, 3.82 / 8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual", [None, 1.7])
def test_policy_loss_and_gradient_against_the_reference(seed: int, dual: float | None) -> None:
    lengths = ref.random_lengths(seed)
    new, old, advantages, logw = (ref.random_rows(seed + 10 * k, lengths, scale=0.6) for k in range(4))
    weights = [[math.exp(x) for x in row] for row in logw]
    leaf, mask = ref.pad(new).requires_grad_(), ref.mask_of(new)
    args = (leaf, ref.pad(old), ref.pad(advantages), mask)
    got = policy_loss(*args, bound=ppo(dual), weights=ref.pad(weights), denominator=17.0)
    expected, slopes = ref.policy_loss(new, old, advantages, weights, (0.2, 0.28, dual), 17.0)
    actual = dict(zip(("loss", "low", "high", "dual", "approx_kl", "ratio_mean", "ratio_max"), got, strict=True))
    assert {k: float(v.detach()) for k, v in actual.items()} == pytest.approx(expected, rel=1e-6)
    assert all(not v.requires_grad for k, v in actual.items() if k != "loss")
    close(
        gradient(got.loss, leaf),
        ref.pad([slopes], 0.0).new_zeros(mask.shape).masked_scatter(mask, doubles(slopes)),
    )


def test_the_reference_meets_every_bound() -> None:
    cases = [ref.objective(math.exp(r), a, 0.2, 0.28, 1.7)[1] for r in (-1.0, 0.0, 1.0) for a in (-1.0, 1.0)]
    assert set(cases) == {"low", "high", "dual", ""}


def test_a_capped_ratio_weighs_the_gradient_of_its_log_prob() -> None:
    """CISPO with cap 5: ratios 1/2, 2 and 8 weigh 1/2, 2 and 5, and only the last one is bounded."""
    new, r, advantages = doubles([[-1.0, -2.0, -4.0]]), doubles([[0.5, 2.0, 8.0]]), doubles([[1.0, -3.0, 2.0]])
    new.requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    capped = bound("cispo", cap=5)
    actual = policy_loss(new, new.detach() - r.log(), advantages, mask, bound=capped, weights=None, denominator=4)
    # -(0.5 * 1 * -1 + 2 * -3 * -2 + 5 * 2 * -4) / 4
    close(actual.loss.detach(), 28.5 / 4)
    close(gradient(actual.loss, new), [[-0.5 / 4, 6 / 4, -10 / 4]])
    shares = actual.clip_fraction_low, actual.clip_fraction_high, actual.dual_clip_fraction
    assert [float(share) for share in shares] == [0, 0.25, 0]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("clip", get_args(Clip))
def test_what_lies_off_the_mask_changes_neither_loss_nor_gradient(clip: Clip, sequence: bool) -> None:
    inputs = doubles([[-1.0, -2.0, NAN]]), doubles([[-1.1, -1.9, NAN]]), doubles([[1.0, -2.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    options: dict[str, Any] = {"bound": bound(clip), "weights": None, "denominator": 2, "sequence": sequence}
    results = []
    for width in (2, 3):
        new, old, advantages = (each[:, :width] for each in inputs)
        new = new.clone().requires_grad_()
        loss = policy_loss(new, old, advantages, mask[:, :width], **options).loss
        results.append((float(loss.detach()), gradient(loss, new)[0].tolist()))
    (short, before), (long, after) = results
    assert short == long
    assert [*before, 0.0] == after


def test_no_bound_takes_the_gradient_of_a_token_without_an_advantage() -> None:
    r = doubles([[0.1, 1.0, 9.0]])
    none = torch.zeros_like(r)
    bounded = ppo(3.0)(r, none, none)
    assert [side.any().item() for side in (bounded.low, bounded.high, bounded.dual)] == [False] * 3


def test_log_probs_gone_astray_leave_the_loss_finite() -> None:
    new = torch.tensor([[900.0, -900.0, 0.0]], requires_grad=True)
    old, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        options = {"bound": ppo(None), "weights": None, "denominator": 3}
        got = policy_loss(new, old, torch.full((1, 3), sign), mask, **options)
        assert all(x.isfinite() for x in got)
        close(gradient(got.loss, new), [[0.0, 0.0, -sign / 3]], 1e-6)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("low", 0.0, "clip_eps_low must lie in"),
        ("low", 1.1, "clip_eps_low must lie in"),
        ("high", -0.1, "clip_eps_high be > 0"),
        ("dual", 1.0, "dual_clip must be > 1"),
        ("weights", torch.ones(2), r"weights is \[2\], should be \[1, 2\]"),
        ("denominator", 0, "denominator must be"),
    ],
)
def test_policy_loss_refuses_bad_input(option: str, value: Any, message: str) -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    clips = {"low": 0.2, "high": 0.28}
    given = (
        {"bound": bound("ppo", **clips | {option: value})} if option in ("low", "high", "dual") else {option: value}
    )
    options: dict[str, Any] = {"bound": ppo(None), "weights": None, "denominator": 1} | given
    with pytest.raises(ValueError, match=message):
        policy_loss(x, x, x, mask, **options)
