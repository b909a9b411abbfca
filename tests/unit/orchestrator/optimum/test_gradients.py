"""The expected gradient of everything that is offered against the exact one, over all responses of a small problem.

    python -m pytest -q -s -m "" tests/unit/orchestrator/optimum/test_gradients.py

prints the relative errors. Exact is the gradient of J = E[r] - beta KL(pi || ref) by autograd in float64. What is
biased by design (a cap, a band, a clip, lambda below 1 with an imperfect critic) is compared with what it is meant to
be, in closed form over the tree of responses or over all of them, and its distance from the exact gradient is stated.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from orchestrator.algorithms.contract import KLConfig
from orchestrator.algorithms.registry import algorithms, presets
from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.loop.batch import Batch
from quartet.config.base import ConfigError
from quartet.wire.codec import Floats
from tests.trajectories import cut
from tests.unit import known_optimum as known
from tests.unit.expected_gradients import WHOLE, Learner, Tables, error, experiences, parse
from tests.unit.known_optimum import BETA, COUNT, LENGTHS, MASK, MOST, PROMPTS, Claim, gradient_of, over_paths

pytestmark = pytest.mark.processes  # for their length: a minute in all
LIMIT = 1e-5
"""Largest error, relative to the exact gradient's length."""
WIDE = 1e6
IN_REWARD = {"placement": "reward", "estimator": "k1", "coef": BETA}
"""The penalty of the exact gradient; grpo alone has none."""


@dataclass(frozen=True)
class Problem:
    """The models, and tables of all responses."""

    folder: Path
    model: LlamaForCausalLM
    every: Tensor
    """[2, 259, 3, 7]"""
    ref_every: Tensor
    """[2, 259, 3, 7]"""
    other: Tensor
    """Log-probs of another policy, which may be the one that samples: [2, 259, 3]."""
    rewards: Tensor

    @property
    def logprobs(self) -> Tensor:
        """log pi, with a gradient: [2, 259, 3]."""
        return known.logprobs_of(self.every)

    def tables(self, *, perfect: bool = False, other: bool = False) -> Tables:
        """Tables with a perfect critic or else a random one, sampled by the policy or else by the other one."""
        pi, ref = self.logprobs, known.logprobs_of(self.ref_every)
        behaviour = self.other if other else pi.detach()
        made = Tables(pi, ref, behaviour, known.random_values(4), self.rewards)
        return replace(made, values=known.values_of(pi, made.token_rewards())) if perfect else made

    def exact(self, *, frozen: tuple[int, ...] = ()) -> Tensor:
        """The gradient of J; with the tokens at the `frozen` places taken for given."""
        pi = self.logprobs
        for t in frozen:
            pi = torch.where(torch.arange(MOST) == t, pi.detach(), pi)
        return gradient_of(known.objective(pi, known.logprobs_of(self.ref_every), self.rewards), self.model)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    folders = [known.make_model(tmp_path_factory.mktemp("model"), seed) for seed in range(3)]
    model, ref, other = (known.load(folder) for folder in folders)
    with torch.no_grad():
        ref_every, wide = known.every_logprob(ref), known.every_logprob(other)
    every = known.every_logprob(model)
    near = (0.6 * every.detach() + 0.4 * wide).log_softmax(-1)  # ratios from a third to three, about
    return Problem(folders[0], model, every, ref_every, known.logprobs_of(near), known.make_rewards(3))


def report(name: str, actual: Tensor, exact: Tensor) -> None:
    """Prints the error, and checks it."""
    found = error(actual, exact)
    print(f"{name}: {found:.1e}")
    assert found <= LIMIT


def likely(logprobs: Tensor) -> Tensor:
    return logprobs.detach().sum(-1).exp()


def spread(advantages: Floats) -> float:
    """Standard deviation over all tokens, by which whitening divides."""
    return float(np.sqrt(advantages.astype(np.float64).var(ddof=1) + 1e-8))


def test_the_problem_is_what_it_says(problem: Problem) -> None:
    """The policies differ, so that no term is near 0, and the best policy is better than others near it."""
    assert COUNT == 1 + 6 + 6 * 6 * 7 == 259
    pi, ref = problem.logprobs.detach(), known.logprobs_of(problem.ref_every)
    for each in (pi, ref, problem.other):
        torch.testing.assert_close(likely(each).sum(-1), torch.ones(2, dtype=torch.float64))
    assert float((likely(pi) * (pi - ref).sum(-1)).sum(-1).min()) > 0.05
    k = (pi - problem.other).exp()[:, MASK]
    assert 0.1 < float(k.min()) < 0.7
    assert 1.4 < float(k.max()) < 4
    # J of the best policy, and of policies that are near it.
    total = ref.sum(-1) + problem.rewards / BETA
    best = total.log_softmax(-1)
    draw = torch.Generator().manual_seed(0)

    def value(total: Tensor) -> float:
        return float((total.exp() * (problem.rewards - BETA * (total - ref.sum(-1)))).sum() / 2)

    top = known.optimum(ref, problem.rewards)
    assert value(best) == pytest.approx(top, abs=1e-12)
    for scale in (1e-3, 0.1, 1.0):
        noise = scale * torch.randn(best.shape, generator=draw, dtype=torch.float64)
        assert value((best + noise).log_softmax(-1)) < top


LAYOUTS = [{}, {"packing": True}, {"micro_batch_tokens": 700}, {"packing": True, "micro_batch_tokens": 700}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gae_is_exact_with_a_perfect_critic(problem: Problem, layout: dict[str, Any]) -> None:
    """At the default lambda of 0.95, in every layout of the learner."""
    tables = problem.tables(perfect=True)
    learner = Learner(problem.folder, parse(), **layout)
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    report(f"gae, lambda 0.95, true values {layout or ''}", actual, problem.exact())


def test_whitening_divides_by_the_deviation_and_changes_nothing_else(problem: Problem) -> None:
    tables = problem.tables(perfect=True)
    plain = Learner(problem.folder, parse()).estimate(experiences(tables))[1]
    learner = Learner(problem.folder, parse(scale="batch"))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    report("gae, whitened", actual * spread(plain.advantages), problem.exact())


@pytest.mark.parametrize("more", [{}, {"critic_gae_lambda": 0.5}], ids=str)
def test_gae_is_exact_at_lambda_one_with_any_critic(problem: Problem, more: dict[str, Any]) -> None:
    tables = problem.tables()
    learner = Learner(problem.folder, parse(gae_lambda=1.0, **more))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    report(f"gae, lambda 1, any values {more or ''}", actual, problem.exact())


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (1.0, 0.0), (0.9, 0.5)])
def test_gae_with_an_imperfect_critic_is_what_it_claims(problem: Problem, gamma: float, gae_lambda: float) -> None:
    """Q bootstrapped from the critic; with values that are off by 0.5, about as much as rewards differ."""
    tables = problem.tables()
    learner = Learner(problem.folder, parse(gamma=gamma, gae_lambda=gae_lambda))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    claim = Claim(tables.logprobs, tables.behaviour, tables.token_rewards(), tables.values, gamma, gae_lambda)
    report(
        f"gae, gamma {gamma}, lambda {gae_lambda}, any values", actual, gradient_of(claim.objective(), problem.model)
    )
    assert 1e-3 < error(actual, problem.exact()) < 2


def test_lambda_by_length_is_biased_a_little(problem: Problem) -> None:
    tables = problem.tables(perfect=True)
    learner = Learner(problem.folder, parse(gae_lambda_alpha=1.5))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    # A_t = sum over l of lambda^l delta_t+l, with lambda = 1 - 1 / (1.5 T) of each response.
    following = torch.cat([tables.values[..., 1:], torch.zeros_like(tables.values[..., :1])], -1)
    deltas = torch.where(MASK, tables.token_rewards() + following - tables.values, 0.0)
    lambdas = (1 - 1 / (1.5 * LENGTHS.double()))[None, :]
    sums = [sum(lambdas**later * deltas[..., t + later] for later in range(MOST - t)) for t in range(MOST)]
    claim = over_paths(tables.logprobs, tables.behaviour, torch.stack(sums, -1))  # type: ignore[arg-type]
    report("gae, lambda by length, true values", actual, gradient_of(claim, problem.model))
    bias = error(actual, problem.exact())
    print(f"gae, lambda by length, distance from exact: {bias:.1e}")
    assert 1e-4 < bias < 5e-2


def test_what_the_critic_learns_at_lambda_one_are_the_true_values(problem: Problem) -> None:
    """In expectation over what follows, whatever the critic says now."""
    tables = problem.tables()
    learner = Learner(problem.folder, parse(critic_gae_lambda=1.0))
    batch, estimate = learner.estimate(experiences(tables))
    returns = batch.padded(cut(estimate.returns, batch.columns.responses)).double().view(len(PROMPTS), COUNT, MOST)
    true = known.values_of(tables.logprobs, tables.token_rewards())
    # As rewards that are all earned at once, so that what is expected of them is what is expected of the returns.
    later = torch.cat([returns[..., 1:], torch.zeros_like(returns[..., :1])], -1)
    expected = known.values_of(tables.logprobs, torch.where(MASK, returns - later, 0.0))
    assert float((expected - true)[:, MASK].abs().max()) < 1e-5


Pairs = Callable[[tuple[int, ...], int | None, int], Batch]


@pytest.fixture(scope="module")
def pairs(problem: Problem) -> Pairs:
    """Versions, the oldest that is trained on, and a prompt -> a batch of all pairs of responses to it, with the
    learner's log-probs. Each is made once, as that takes much longer than any estimate."""

    @functools.cache
    def made(versions: tuple[int, ...], oldest: int | None, prompt: int) -> Batch:
        learner = Learner(problem.folder, parse(kind="rloo", samples_per_prompt=2))
        own = experiences(problem.tables(), versions)[prompt * COUNT : (prompt + 1) * COUNT]
        return learner.batch([each for first in own for second in own for each in (first, second)], oldest)

    return made


def leave_one_out(
    learner: Learner, pairs: Pairs, tables: Tables, versions: tuple[int, ...] = (0,) * MOST, oldest: int | None = None
) -> Floats:
    """Advantages of each response in the mean over the other response to its prompt: all pairs are estimated."""
    means: list[Any] = []
    for prompt in range(len(PROMPTS)):
        batch = pairs(versions, oldest, prompt)
        p = likely(tables.behaviour)[prompt].numpy()
        rows = cut(learner.credited(batch).advantages, batch.columns.responses)[::2]
        means.extend(
            np.einsum("j,jt->t", p, np.stack(rows[i * COUNT : (i + 1) * COUNT]).astype(np.float64))
            for i in range(COUNT)
        )
    advantages: Floats = np.concatenate(means).astype(np.float32)
    return advantages


@pytest.mark.parametrize("kind", algorithms())
def test_every_algorithm_goes_uphill(problem: Problem, pairs: Pairs, kind: str) -> None:
    """With the settings that a file has which names the kind alone, whatever scale and bias they have by design."""
    needs = presets()[kind]
    each = 1 if needs.needs_samples_per_prompt == 1 else 2
    tables = problem.tables(perfect=needs.needs_critic)
    unclipped: dict[str, Any] = {"score_clip": None} if needs.score_weight else {}
    algorithm = parse_algorithm({"kind": kind, "samples_per_prompt": each} | unclipped | WHOLE)
    learner = Learner(problem.folder, algorithm)
    if each == 1:
        batch, estimate = learner.estimate(experiences(tables))
        advantages = estimate.advantages
    else:
        batch, advantages = learner.batch(experiences(tables)), leave_one_out(learner, pairs, tables)
    actual, exact = learner.expected(batch, advantages, likely(tables.behaviour)), problem.exact()
    if algorithm.kl.placement == "loss":  # which no scale of the advantages weighs: compared without
        actual = learner.expected(batch, advantages, likely(tables.behaviour), kl_coef=0.0)
        exact = gradient_of((likely_with_gradient(tables.logprobs) * problem.rewards).sum() / 2, problem.model)
    if not algorithm.score_weight:  # which learns from the reference alone
        exact = gradient_of(-known.divergence(problem.every, problem.ref_every, forward=True), problem.model)
    alike = float(actual @ exact / (actual.norm() * exact.norm()))
    print(f"{kind}, by default: cosine {alike:.3f} with the exact gradient")
    assert alike > 0.8


def test_the_mean_of_the_group_as_baseline_is_exact_but_for_its_scale(problem: Problem, pairs: Pairs) -> None:
    """A response's own reward is in the mean, which takes (G - 1) / G of the gradient: half of it in pairs."""
    tables = problem.tables()
    algorithm = parse(kind="grpo", samples_per_prompt=2, scale="none", reduction="tokens", kl=IN_REWARD)
    learner = Learner(problem.folder, algorithm)
    advantages = leave_one_out(learner, pairs, tables)
    actual = learner.expected(learner.batch(experiences(tables)), advantages, likely(tables.behaviour))
    report("grpo, not divided, pairs", 2 * actual, problem.exact())


def test_the_deviation_of_a_pair_makes_its_advantages_signs(problem: Problem, pairs: Pairs) -> None:
    """(R_i - R_j) / 2 over their deviation, which is the distance over the square root of two."""
    tables = problem.tables()
    learner = Learner(problem.folder, parse(kind="grpo", samples_per_prompt=2, reduction="tokens"))
    advantages = leave_one_out(learner, pairs, tables)
    batch = learner.batch(experiences(tables))
    actual = learner.expected(batch, advantages, likely(tables.behaviour), kl_coef=0.0)
    signs = (problem.rewards.unsqueeze(2) - problem.rewards.unsqueeze(1)).sign() / 2**0.5
    means = (signs * likely(tables.behaviour).unsqueeze(1)).sum(-1, keepdim=True)
    claim = over_paths(tables.logprobs, tables.behaviour, torch.where(MASK, means, 0.0))
    found = error(actual, gradient_of(claim, problem.model))
    print(f"grpo, divided, pairs: {found:.1e}")
    assert found < 1e-3  # pairs of nearly the same reward, and what is added to their deviation


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("reduction", ["trajectories", 3])
def test_reductions_weigh_responses_as_they_say(problem: Problem, reduction: str | int, packing: bool) -> None:
    """The sum over the tokens of a response divided by their number, or by three, in the mean over responses."""
    tables = problem.tables()
    learner = Learner(problem.folder, parse(gae_lambda=1.0, reduction=reduction), packing=packing)
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    actual = actual * len(batch) / int(batch.mask.sum())  # from the sum over tokens to that over responses
    lengths = LENGTHS.double() if reduction == "trajectories" else torch.full((COUNT,), 3.0, dtype=torch.float64)
    advantages = torch.where(MASK, tables.to_go() - tables.values, 0.0)
    claim = over_paths(tables.logprobs, tables.behaviour, advantages / lengths[None, :, None])
    name = f"reduction {reduction}" + ", packed" * packing
    report(name, actual, gradient_of(claim, problem.model))


HOLES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), (1, 1, 1)), ((0,), (0, 1, 1)), ((1,), (1, 0, 1))]
"""Places of the tokens that are left out, and versions that leave them out where 1 is the oldest trained on."""


@pytest.mark.parametrize(("frozen", "versions"), HOLES)
def test_leave_one_out_is_exact(
    problem: Problem, pairs: Pairs, frozen: tuple[int, ...], versions: tuple[int, ...]
) -> None:
    tables = problem.tables()
    learner = Learner(problem.folder, parse(kind="rloo", samples_per_prompt=2, max_token_staleness=1))
    advantages = leave_one_out(learner, pairs, tables, versions, 1)
    batch = learner.batch(experiences(tables, versions), 1)
    actual = learner.expected(batch, advantages, likely(tables.behaviour))
    report(f"rloo, tokens left out: {frozen or 'none'}", actual, problem.exact(frozen=frozen))


@pytest.mark.parametrize(("frozen", "versions"), HOLES)
def test_reinforce_is_exact_but_for_its_scale(
    problem: Problem, frozen: tuple[int, ...], versions: tuple[int, ...]
) -> None:
    """Whitening's mean is a baseline that is the same for all tokens; its deviation is that of the rewards to go."""
    tables = problem.tables()
    learner = Learner(problem.folder, parse(kind="reinforce++", max_token_staleness=1))
    batch, estimate = learner.estimate(experiences(tables, versions), 1)
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    trained = MASK & torch.tensor([t not in frozen for t in range(MOST)])
    scale = float((tables.to_go()[:, trained].var() + 1e-8).sqrt())
    report(f"reinforce++, tokens left out: {frozen or 'none'}", actual * scale, problem.exact(frozen=frozen))


@pytest.mark.parametrize(("frozen", "versions"), HOLES[1:])
def test_gae_is_exact_for_the_tokens_that_are_not_too_old(
    problem: Problem, frozen: tuple[int, ...], versions: tuple[int, ...]
) -> None:
    tables = problem.tables()
    learner = Learner(problem.folder, parse(gae_lambda=1.0, max_token_staleness=1))
    batch, estimate = learner.estimate(experiences(tables, versions), 1)
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    report(f"gae, lambda 1, tokens left out: {frozen}", actual, problem.exact(frozen=frozen))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_in_the_loss_is_the_next_tokens_divergence(problem: Problem, estimator: str) -> None:
    tables = problem.tables()
    kl = {"placement": "loss", "estimator": estimator, "coef": BETA}
    learner = Learner(problem.folder, parse(minibatch_size=1, gae_lambda=1.0, kl=kl))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected_one_by_one(batch, estimate.advantages, likely(tables.behaviour))
    earned = (likely_with_gradient(tables.logprobs) * problem.rewards).sum() / len(PROMPTS)
    penalty = known.divergence(problem.every, problem.ref_every, forward=estimator == "k2")
    report(f"{estimator} in the loss", actual, gradient_of(earned - BETA * penalty, problem.model))
    bias = error(actual, problem.exact())
    print(f"{estimator} in the loss, distance from the gradient of J: {bias:.2f}")
    assert bias > 0.05


def likely_with_gradient(logprobs: Tensor) -> Tensor:
    return logprobs.sum(-1).exp()


def test_the_entropy_bonus_is_the_next_tokens_entropy(problem: Problem) -> None:
    tables = problem.tables()
    learner = Learner(problem.folder, parse(minibatch_size=1, gae_lambda=1.0, entropy_coef=0.3))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected_one_by_one(batch, estimate.advantages, likely(tables.behaviour))
    bonus = gradient_of(
        known.at_sampled(-(problem.every.exp() * problem.every).sum(-1), problem.every), problem.model
    )
    report("entropy bonus", actual, problem.exact() + 0.3 * bonus)


@pytest.mark.parametrize(
    ("kl", "reason"),
    [
        ({"estimator": "k1", "placement": "loss"}, "has an expected gradient of zero"),
        ({"estimator": "k2", "placement": "reward"}, "does not pull to the reference"),
        ({"estimator": "k3", "placement": "reward"}, "does not pull to the reference"),
    ],
)
def test_what_is_no_penalty_is_refused(problem: Problem, kl: dict[str, Any], reason: str) -> None:
    """With a configuration that was not checked, the gradient less that without a penalty is far from beta times the
    gradient of KL(pi || ref)."""
    with pytest.raises(ConfigError, match=reason):
        parse(kl=kl)
    tables, unchecked = problem.tables(), KLConfig().model_copy(update=kl | {"coef": BETA})
    whole = kl["placement"] == "reward"
    algorithm = parse(gae_lambda=1.0, minibatch_size=len(PROMPTS) * COUNT if whole else 1)
    learner = Learner(problem.folder, algorithm.model_copy(update={"kl": unchecked}))
    batch, estimate = learner.estimate(experiences(tables))
    step = learner.expected if whole else learner.expected_one_by_one
    actual = step(batch, estimate.advantages, likely(tables.behaviour))
    earned = gradient_of((likely_with_gradient(tables.logprobs) * problem.rewards).sum() / 2, problem.model)
    pull = problem.exact() - earned
    missing = error(actual - earned, pull)
    print(f"{kl['estimator']} in the {kl['placement']}, refused: {missing:.2f} of the penalty's gradient is wrong")
    assert missing > 0.3


CORRECTIONS: list[tuple[dict[str, Any], Any]] = [
    ({"correction": "tis", "importance_cap": WIDE}, lambda pi, b: pi / b),
    ({"correction": "tis", "importance_cap": 1.2}, lambda pi, b: min(pi / b, 1.2)),
    ({"correction": "tis", "importance_cap": None}, lambda pi, b: 1.0),
    ({"correction": "icepop"}, lambda pi, b: pi / b if 0.5 <= pi / b <= 5 else 0),
    ({"correction": "icepop", "importance_band": (0.8, 1.25)}, lambda pi, b: pi / b if 0.8 <= pi / b <= 1.25 else 0),
    ({"correction": "decoupled", "importance_cap": 1.2}, lambda pi, b: pi / b if pi / b <= 1.2 else 0),
    ({"correction": "decoupled", "importance_cap": None}, lambda pi, b: pi / b),
    ({"clip": "dis"}, lambda pi, b: pi / b if 0.2 < pi / b < 4 else 0),
    ({"clip": "dis", "importance_band": (0.8, 1.25)}, lambda pi, b: pi / b if 0.8 < pi / b < 1.25 else 0),
]


@pytest.mark.parametrize(
    ("given", "weight"), CORRECTIONS, ids=lambda each: str(each) if isinstance(each, dict) else ""
)
def test_corrections_by_tokens_are_what_they_claim(problem: Problem, given: dict[str, Any], weight: Any) -> None:
    """The next token is the policy's, but beginnings and what follows are the sampler's: biased by design."""
    tables = problem.tables(other=True)
    learner = Learner(problem.folder, parse(gae_lambda=1.0, **given))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    claim = Claim(tables.logprobs, tables.behaviour, tables.token_rewards(), tables.values)
    report(f"{given}", actual, gradient_of(claim.objective(weight), problem.model))
    bias = error(actual, problem.exact())
    print(f"{given}, distance from exact: {bias:.2f}")
    assert 0.05 < bias < 2


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("frozen", "versions"), HOLES)
def test_the_ratio_of_whole_responses_is_exact(
    problem: Problem, frozen: tuple[int, ...], versions: tuple[int, ...], packing: bool
) -> None:
    """The same holds for the tokens that are trained on where others are left out."""
    tables = problem.tables(other=True)
    given = {"correction": "tis-sequence", "importance_cap": WIDE, "max_token_staleness": 1}
    learner = Learner(problem.folder, parse(gae_lambda=1.0, **given), packing=packing)
    batch, estimate = learner.estimate(experiences(tables, versions), 1)
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    name = f"tis-sequence, no cap binding, tokens left out: {frozen or 'none'}"
    report(name + ", packed" * packing, actual, problem.exact(frozen=frozen))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("frozen", "versions"), HOLES)
@pytest.mark.parametrize("correction", ["tis-sequence", "geometric"])
def test_corrections_by_responses_are_what_they_claim(
    problem: Problem, correction: str, frozen: tuple[int, ...], versions: tuple[int, ...], packing: bool
) -> None:
    """A cap and a band that bind."""
    tables = problem.tables(other=True)
    limits: dict[str, Any] = {"tis-sequence": {"importance_cap": 1.2}, "geometric": {"importance_band": (0.9, 1.1)}}
    given = {"correction": correction, "max_token_staleness": 1} | limits[correction]
    learner = Learner(problem.folder, parse(gae_lambda=1.0, **given), packing=packing)
    batch, estimate = learner.estimate(experiences(tables, versions), 1)
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    log_k = (tables.logprobs.detach() - tables.behaviour).sum(-1)
    mean = (log_k / LENGTHS).exp()
    weights = log_k.exp().clamp(max=1.2) if correction == "tis-sequence" else ((mean >= 0.9) & (mean <= 1.1)).double()
    trained = MASK & torch.tensor([t not in frozen for t in range(MOST)])
    advantages = torch.where(trained, tables.to_go() - tables.values, 0.0)
    claim = over_paths(tables.logprobs, tables.behaviour, weights.unsqueeze(-1) * advantages)
    name = f"{correction}, {limits[correction]}, tokens left out: {frozen or 'none'}"
    report(name + ", packed" * packing, actual, gradient_of(claim, problem.model))
    bias = error(actual, problem.exact(frozen=frozen))
    print(f"{name}, distance from exact: {bias:.2f}")
    assert 0.05 < bias < 2


@pytest.mark.parametrize("clips", [(0.999, WIDE, None), (0.2, 0.2, None), (0.999, WIDE, 1.2)], ids=str)
def test_the_engines_logprobs_as_the_old_ones_make_the_ratio_the_correction(
    problem: Problem, clips: tuple[float, float, float | None]
) -> None:
    """KL in the rewards is then the sampler's; a token beyond a clip has no gradient, if it would go further."""
    tables, (low, high, dual) = problem.tables(other=True), clips
    given = {"old_logprobs": "rollout", "clip_eps_low": low, "clip_eps_high": high, "dual_clip": dual}
    learner = Learner(problem.folder, parse(gae_lambda=1.0, **given))
    batch, estimate = learner.estimate(experiences(tables))
    actual = learner.expected(batch, estimate.advantages, likely(tables.behaviour))
    advantages = tables.to_go(tables.behaviour) - tables.values
    k = (tables.logprobs.detach() - tables.behaviour).exp()
    low_clip = (advantages < 0) & ((k < 1 - low) | (k > (dual or WIDE)))
    clipped = low_clip | ((advantages > 0) & (k > 1 + high))
    claim = over_paths(tables.logprobs, tables.behaviour, torch.where(MASK & ~clipped, k * advantages, 0.0))
    report(f"old_logprobs: rollout, clips {clips}", actual, gradient_of(claim, problem.model))
    assert bool(clipped[:, MASK].any()) is (clips != (0.999, WIDE, None))
