"""Losses and advantages against the formulas of TRL, verl and OpenRLHF, and each difference from them.

The formulas are those of these versions, in words of our own:
- TRL 1.10 (commit f2cd57710, 2026-07-24), `GRPOTrainer._compute_loss` and the rewards' part of its
  `_generate_and_score_completions`, and `RLOOTrainer`, whose loss is of commit 00313f219;
- verl (commit 018f23b5f, 2026), `verl/trainer/ppo/core_algos.py`: `agg_loss`, the policy losses vanilla, gspo and
  cispo, and the advantages of grpo, rloo, reinforce_plus_plus and reinforce_plus_plus_baseline;
- OpenRLHF 0.11 (commit 3c3be623, 2026-08-13), `openrlhf/models/loss.py` and `compute_advantages_and_returns`.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.algorithms.contract import Group
from orchestrator.algorithms.registry import parse
from orchestrator.algorithms.responses import Responses
from orchestrator.algorithms.rewards import overlong_penalties
from tests.unit.bare_learner import Case, trained
from tests.unit.reference_ppo import close

SEEDS = range(4)
LONGEST = 9
LOW, HIGH = 0.2, 0.28


def ragged(seed: int, rows: int = 8, *, left_out: bool = False) -> Case:
    """Responses of 1 to 7 tokens, of which the last is left out whole if asked for; numbers as float32 has them."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 7) for _ in range(rows)]

    def exact(number: float) -> float:
        return float(np.float32(number))

    new = [[exact(draw.gauss(-1, 0.5)) for _ in range(count)] for count in counts]
    near = {
        name: [[exact(value + draw.gauss(0, 0.3)) for value in row] for row in new]
        for name in ("logprobs", "old_logprobs", "ref_logprobs")
    }
    advantages = [[exact(draw.gauss(0, 1))] * count for count in counts]
    marks = [[not (left_out and row == rows - 1)] * count for row, count in enumerate(counts)]
    return Case(new, near | {"advantages": advantages}, marks)


class Padded:
    """A case as padded tensors of float64."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.new = self._of(case.new).requires_grad_()
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "advantages"):
            setattr(self, name, self._of(case.numbers[name]))
        self.mask = self._of([[float(mark) for mark in row] for row in case.trained])
        self.log_ratio = self.new - self.old_logprobs

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor

    def _of(self, rows: list[list[float]]) -> Tensor:
        made = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
        for index, row in enumerate(rows):
            made[index, : len(row)] = torch.tensor(row, dtype=torch.float64)
        return made

    def gradient(self, loss: Tensor) -> Tensor:
        """In the order of the table: zero at its first entry, then token by token."""
        (made,) = torch.autograd.grad(loss, self.new, retain_graph=True)
        rows = [made[index, : len(row)] for index, row in enumerate(self.case.new)]
        return torch.cat([torch.zeros(1, dtype=torch.float64), *rows])

    def row_mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum(1, keepdim=True) / self.mask.sum(1, keepdim=True).clamp(min=1)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r) A), which all three have."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def k3(padded: Padded) -> Tensor:
    difference = padded.ref_logprobs - padded.new
    return difference.exp() - difference - 1


# How each sums up: losses [B, T], mask [B, T] -> [].


def verl_token_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def verl_sequence_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean over the rows that have a token."""
    counts = mask.sum(1)
    return ((losses * mask).sum(1) / (counts + 1e-8)).sum() / (counts > 0).sum()


def verl_constant(losses: Tensor, mask: Tensor, divisor: float) -> Tensor:
    return (losses * mask).sum() / (mask.sum(1) > 0).sum() / divisor


def trl_grpo(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean over all rows, also those without a token."""
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def trl_dr_grpo(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / (len(losses) * LONGEST)


Settings = dict[str, Any]


def ours(case: Case, kl_coef: float = 0.0, **settings: Any) -> tuple[float, Tensor]:
    section = {"kind": "grpo", "correction": "tis", "importance_cap": None} | settings
    return trained(case, parse(section).sized(LONGEST), kl_coef=kl_coef)


def same(actual: tuple[float, Tensor], padded: Padded, loss: Tensor) -> None:
    close(actual[0], float(loss.detach()), 1e-6)
    close(actual[1], padded.gradient(loss), 1e-6)


def differs(actual: tuple[float, Tensor], padded: Padded, loss: Tensor) -> None:
    assert float((actual[1] - padded.gradient(loss)).abs().max()) > 1e-3


ASYMMETRIC: Settings = {"clip_eps_low": LOW, "clip_eps_high": HIGH}


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_grpo_dapo_and_dr_grpo(seed: int) -> None:
    """loss_type grpo, dapo and dr_grpo, with beta, and with delta, which is the dual clip."""
    case = ragged(seed)
    padded = Padded(case)
    losses = clipped(padded.log_ratio.exp(), padded.advantages, LOW, HIGH)
    sums: dict[Any, Tensor] = {
        "trajectories": trl_grpo(losses, padded.mask),
        "tokens": verl_token_mean(losses, padded.mask),
        "constant": trl_dr_grpo(losses, padded.mask),
    }
    for reduction, loss in sums.items():
        same(ours(case, reduction=reduction, **ASYMMETRIC), padded, loss)
    penalised = trl_grpo(losses + 0.04 * k3(padded), padded.mask)
    kl = {"coef": 0.04, "placement": "loss", "estimator": "k3"}
    same(ours(case, kl_coef=0.04, kl=kl, **ASYMMETRIC), padded, penalised)
    bounded = padded.log_ratio.exp().clamp(max=1.4)
    with_delta = -torch.minimum(
        bounded * padded.advantages, padded.log_ratio.exp().clamp(1 - LOW, 1 + HIGH) * padded.advantages
    )
    same(ours(case, dual_clip=1.4, **ASYMMETRIC), padded, trl_grpo(with_delta, padded.mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_counts_rows_of_which_nothing_is_trained_on(seed: int) -> None:
    """TRL's means for grpo and dr_grpo are over all rows; ours, verl's and OpenRLHF's over those with a token."""
    case = ragged(seed, left_out=True)
    padded = Padded(case)
    losses = clipped(padded.log_ratio.exp(), padded.advantages, LOW, HIGH)
    rows = len(case.new)
    for reduction, loss in (
        ("trajectories", trl_grpo(losses, padded.mask)),
        ("constant", trl_dr_grpo(losses, padded.mask)),
    ):
        actual = ours(case, reduction=reduction, **ASYMMETRIC)
        differs(actual, padded, loss)
        same(actual, padded, loss * rows / (rows - 1))
    same(ours(case, **ASYMMETRIC), padded, verl_sequence_mean(losses, padded.mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_ratios_of_all_three(seed: int) -> None:
    """TRL's importance_sampling_level sequence, whose gradient goes through the mean; verl's gspo, which puts it at
    each token; OpenRLHF's gspo: equal, as a response has one advantage."""
    case = ragged(seed)
    padded = Padded(case)
    low, high = 0.05, 0.06
    actual = ours(case, ratio="sequence", clip_eps_low=low, clip_eps_high=high)
    mean = padded.row_mean(padded.log_ratio)
    same(actual, padded, trl_grpo(clipped(mean.exp(), padded.advantages, low, high), padded.mask))
    at_tokens = padded.new - padded.new.detach() + mean.detach()
    same(actual, padded, verl_sequence_mean(clipped(at_tokens.exp(), padded.advantages, low, high), padded.mask))
    # With an advantage that differs from token to token the two would be different losses: such are refused.
    uneven = padded.advantages * torch.linspace(0.2, 2, padded.new.shape[1], dtype=torch.float64)
    through, at = (clipped(ratio.exp(), uneven, low, high) for ratio in (mean, at_tokens))
    mixed, own = (padded.gradient(verl_sequence_mean(each, padded.mask)) for each in (through, at))
    assert float((mixed - own).abs().max()) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_rloo(seed: int) -> None:
    """One ratio for a response, the product of its tokens', and the mean over responses: at ratio 1 the gradient of
    `reduction: 1`, elsewhere another."""
    case = ragged(seed)
    rows, tokens = len(case.new), sum(map(len, case.new))

    def trl(padded: Padded) -> Tensor:
        whole = (padded.log_ratio * padded.mask).sum(1)
        return clipped(whole.exp(), padded.advantages[:, 0], LOW, HIGH).mean()

    padded = Padded(case)
    differs(ours(case, reduction="tokens", **ASYMMETRIC), padded, trl(padded))
    same_policy = replace(case, numbers=dict(case.numbers) | {"old_logprobs": case.new})
    padded = Padded(same_policy)
    gradient = padded.gradient(trl(padded))
    close(ours(same_policy, reduction=1, **ASYMMETRIC)[1], gradient, 1e-6)
    close(ours(same_policy, reduction="tokens", **ASYMMETRIC)[1] * tokens / rows, gradient, 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_corrects_by_the_product_over_a_response(seed: int) -> None:
    """TRL's default, sequence_mask, leaves a response out above the cap, where tis-sequence truncates its weight."""
    case, cap = ragged(seed), 1.2
    padded = Padded(case)
    losses = clipped(padded.log_ratio.exp(), padded.advantages, LOW, HIGH)
    product = ((padded.old_logprobs - padded.logprobs) * padded.mask).sum(1, keepdim=True).exp()
    assert 0 < int((product > cap).sum()) < len(case.new)
    actual = ours(case, reduction="tokens", correction="tis-sequence", importance_cap=cap, **ASYMMETRIC)
    same(actual, padded, verl_token_mean(losses * product.clamp(max=cap), padded.mask))
    masked = verl_token_mean(losses * torch.where(product > cap, 0.0, product), padded.mask)
    differs(actual, padded, masked)
    differs(ours(case, reduction="tokens", correction="tis", importance_cap=cap, **ASYMMETRIC), padded, masked)


@pytest.mark.parametrize("seed", SEEDS)
def test_verl_vanilla(seed: int) -> None:
    """With its dual clip of 3, which it cannot do without, and its modes of agg_loss; rollout weights multiply."""
    case = ragged(seed)
    padded = Padded(case)
    ratio = padded.log_ratio.clamp(-20, 20).exp()
    plain = clipped(ratio, padded.advantages, LOW, HIGH)
    for dual in (3.0, 1.2):
        losses = torch.where(padded.advantages < 0, torch.minimum(-dual * padded.advantages, plain), plain)
        given: Settings = {"dual_clip": dual, **ASYMMETRIC}
        same(ours(case, reduction="tokens", **given), padded, verl_token_mean(losses, padded.mask))
        same(ours(case, reduction="trajectories", **given), padded, verl_sequence_mean(losses, padded.mask))
        same(ours(case, reduction=5, **given), padded, verl_constant(losses, padded.mask, 5))
        weights = (padded.old_logprobs - padded.logprobs).exp().clamp(max=1.1)
        corrected = ours(case, reduction="tokens", importance_cap=1.1, **given)
        same(corrected, padded, verl_token_mean(losses * weights, padded.mask))
    # Its constant is the width of the padded batch unless one is given; ours is the longest response that may be.
    width = verl_constant(plain, padded.mask, padded.new.shape[1])
    actual = ours(case, reduction="constant", **ASYMMETRIC)
    differs(actual, padded, width)
    same(actual, padded, width * padded.new.shape[1] / LONGEST)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo(seed: int) -> None:
    """TRL's epsilon_high is the bound itself, as clip_cap is; verl bounds the weight on both sides."""
    case = ragged(seed)
    padded = Padded(case)
    ratio = padded.log_ratio.exp().detach()
    actual = ours(case, clip="cispo", clip_cap=1.2, reduction="tokens")
    trl = -ratio.clamp(max=1.2) * padded.advantages * padded.new
    same(actual, padded, verl_token_mean(trl, padded.mask))
    verl = -ratio.clamp(0.95, 1.2) * padded.advantages * padded.new
    differs(actual, padded, verl_token_mean(verl, padded.mask))
    above = replace(
        case, numbers=dict(case.numbers) | {"old_logprobs": [[n - 0.01 for n in row] for row in case.new]}
    )
    alike = Padded(above)
    bounded = -alike.log_ratio.exp().detach().clamp(0.95, 1.2) * alike.advantages * alike.new
    same(ours(above, clip="cispo", clip_cap=1.2, reduction="tokens"), alike, verl_token_mean(bounded, alike.mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_openrlhf_policy_loss(seed: int) -> None:
    """Both of its sums, and its corrections: icepop is ours; its tis also raises weights below a threshold."""
    case = ragged(seed, left_out=True)
    padded = Padded(case)
    losses = clipped(padded.log_ratio.clamp(-20, 20).exp(), padded.advantages, LOW, HIGH)
    k = (padded.old_logprobs - padded.logprobs).exp()
    same(ours(case, reduction="tokens", **ASYMMETRIC), padded, verl_token_mean(losses, padded.mask))
    same(ours(case, reduction="trajectories", **ASYMMETRIC), padded, verl_sequence_mean(losses, padded.mask))
    icepop = torch.where((k >= 0.8) & (k <= 1.25), k, 0.0)
    given: Settings = {"correction": "icepop", "importance_band": [0.8, 1.25], **ASYMMETRIC}
    same(ours(case, reduction="tokens", **given), padded, verl_token_mean(losses * icepop, padded.mask))
    capped = ours(case, reduction="tokens", importance_cap=1.2, **ASYMMETRIC)
    same(capped, padded, verl_token_mean(losses * k.clamp(max=1.2), padded.mask))
    differs(capped, padded, verl_token_mean(losses * k.clamp(0.9, 1.2), padded.mask))


# Advantages: rewards [B], one for each response, and groups [B].


GROUPS = torch.tensor([5, 2, 5, 9, 2, 5, 2, 9, 5])
"""Groups of four, three and two responses, in no order."""


def rewards(seed: int) -> Tensor:
    return torch.tensor([random.Random(seed).gauss(0, 2) for _ in GROUPS], dtype=torch.float64) + torch.arange(9) % 3


def advantages(kind: str, given: Tensor, groups: Tensor, **settings: Any) -> Tensor:
    mask = torch.ones(len(given), 1, dtype=torch.bool)
    algorithm = parse({"kind": kind, "samples_per_prompt": 4} | settings)
    return algorithm.credit(Responses(given[:, None], mask, mask, None, groups)).advantages[:, 0]


def by_group(given: Tensor, formula: Any) -> Tensor:
    made = torch.zeros_like(given)
    for number in set(GROUPS.tolist()):
        made[number == GROUPS] = formula(given[number == GROUPS])
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_groups(seed: int) -> None:
    """verl adds 1e-6 to a deviation, as we do; TRL 1e-4 and OpenRLHF 1e-9, which is another number."""
    given = rewards(seed)
    actual = advantages("grpo", given, GROUPS)
    for eps, tolerance in ((1e-6, 1e-12), (1e-4, 1e-3), (1e-9, 1e-3)):
        expected = by_group(given, lambda r, eps=eps: (r - r.mean()) / (r.std() + eps))
        close(actual, expected, tolerance)
        assert (eps == 1e-6) or not torch.equal(actual, expected)
    close(advantages("dr-grpo", given, GROUPS), by_group(given, lambda r: r - r.mean()), 1e-12)
    plain = advantages("rloo", given, GROUPS, scale="none")
    verl = by_group(given, lambda r: r * len(r) / (len(r) - 1) - r.mean() * len(r) / (len(r) - 1))
    trl = by_group(given, lambda r: r - (r.sum() - r) / (len(r) - 1))
    close(plain, verl, 1e-12)
    close(plain, trl, 1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_advantages(seed: int) -> None:
    """verl's variance is unbiased, with 1e-8, as ours; OpenRLHF's is biased."""
    given = rewards(seed)
    centred = by_group(given, lambda r: r - r.mean())
    actual = advantages("reinforce++-baseline", given, GROUPS)
    close(actual, (centred - centred.mean()) * (centred.var() + 1e-8).rsqrt(), 1e-9)
    biased = (centred - centred.mean()) * centred.var(unbiased=False).clamp(min=1e-8).rsqrt()
    close(actual * (9 / 8) ** 0.5, biased, 1e-6)
    # TRL's scale batch divides by the deviation of the rewards, not of the advantages, and adds 1e-4.
    assert float((actual - centred / (given.std() + 1e-4)).abs().max()) > 1e-3
    batch = advantages("reinforce++", given, GROUPS)
    close(batch, (given - given.mean()) * (given.var() + 1e-8).rsqrt(), 1e-9)


def test_a_response_without_siblings_has_no_advantage() -> None:
    """verl gives it its raw reward."""
    alone = torch.tensor([3, 3, 8])
    given = torch.tensor([1.0, 2.0, 7.0], dtype=torch.float64)
    for kind in ("grpo", "dr-grpo"):
        assert advantages(kind, given, alone)[2] == 0
    assert advantages("rloo", given, alone, scale="none").tolist() == [-1, 1, 0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["grpo", "dr-grpo", "rloo", "reinforce++-baseline"])
def test_neither_order_nor_other_groups_change_a_comparison(kind: str, seed: int) -> None:
    """Nor does a response that is missing: the others of its group are compared as if it had never been."""
    given, settings = rewards(seed), {} if kind in ("grpo", "dr-grpo") else {"scale": "none"}
    actual = advantages(kind, given, GROUPS, **settings)
    order = torch.tensor(random.Random(seed).sample(range(9), 9))
    close(advantages(kind, given[order], GROUPS[order], **settings), actual[order], 1e-12)
    own = GROUPS == 5
    close(advantages(kind, given[own], GROUPS[own], **settings), actual[own], 1e-12)
    rest = torch.arange(9) != 2
    fewer = advantages(kind, given[rest], GROUPS[rest], **settings)
    close(fewer[GROUPS[rest] != 5], actual[GROUPS != 5], 1e-12)
    assert float((fewer[GROUPS[rest] == 5] - actual[own & rest]).abs().max()) > 1e-3


def test_the_penalty_in_the_rewards_is_in_the_baseline() -> None:
    """The same with TRL and verl: OpenRLHF takes the baseline of the scores, and adds the penalty after that."""
    penalties = torch.tensor([[-0.1, -0.2], [-0.4, -0.3]], dtype=torch.float64)
    scores = torch.tensor([1.0, 3.0], dtype=torch.float64)
    held = penalties.clone()
    held[:, 1] += scores
    mask = torch.ones(2, 2, dtype=torch.bool)
    algorithm = parse({"kind": "rloo", "samples_per_prompt": 2, "scale": "none"})
    actual = algorithm.credit(Responses(held, mask, mask, None, torch.zeros(2, dtype=torch.int64))).advantages
    totals = scores + penalties.sum(1)
    close(actual, (totals - totals.flip(0))[:, None].expand(2, 2), 1e-12)
    openrlhf = (scores - scores.flip(0))[:, None] + penalties.flip(1).cumsum(1).flip(1)
    assert float((actual - openrlhf).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("scores", "ours", "verl", "openrlhf"),
    [
        ([1.0, 1.0], False, False, False),
        ([0.5, 0.5], False, False, True),
        ([3.0, 1.0], True, True, False),
        ([1.0, 0.0], True, True, True),
    ],
)
def test_groups_that_dynamic_sampling_keeps(scores: list[float], ours: bool, verl: bool, openrlhf: bool) -> None:
    """verl's filter_groups keeps those whose metric has a deviation, OpenRLHF's those with a mean within 0 to 1."""
    assert (float(np.std(scores)) > 0, 0 < float(np.mean(scores)) < 1) == (verl, openrlhf)
    two = np.ones(2, np.int32)
    group = Group({"score": np.asarray(scores, np.float32)}, two, two.astype(bool))
    assert parse({"kind": "dapo", "samples_per_prompt": 2}).admit(group) is ours


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (5, 0.0), (6, 0.25), (8, 0.75), (9, 1.0)])
def test_the_penalty_of_length(length: int, penalty: float) -> None:
    """verl's overlong buffer (DAPO's recipe): min(-(length - (longest - buffer)) / buffer * factor, 0)."""
    verl = min(-(length - (LONGEST - 4)) / 4 * 1.0, 0.0)
    (actual,) = overlong_penalties(torch.tensor([length]), LONGEST, buffer=4, penalty=1.0).tolist()
    assert actual == penalty == -verl


def test_a_buffer_of_one_token_is_for_the_longest_response_alone() -> None:
    assert overlong_penalties(torch.tensor([7, 8]), 8, buffer=1, penalty=2.0).tolist() == [0, 2]


def test_a_buffer_may_be_all_of_the_longest_response() -> None:
    assert overlong_penalties(torch.tensor([1, 4]), 4, buffer=4, penalty=2.0).tolist() == [0.5, 2]
    for longest in (3, None):
        with pytest.raises(ValueError, match=r"buffer must lie in 1\..*, the longest response, got 4"):
            overlong_penalties(torch.tensor([1, 3]), longest, buffer=4, penalty=2.0)
