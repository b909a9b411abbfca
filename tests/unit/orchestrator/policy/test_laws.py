"""Laws of the policy's loss: any division of a batch has the same gradient, for every setting of it."""

import random
from typing import Any

import pytest
import torch

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.registry import parse
from tests.unit.bare_learner import Case, Division, trained, whole
from tests.unit.reference_ppo import close

SEEDS = range(3)
RATIOS: tuple[dict[str, Any], ...] = ({}, {"ratio": "sequence", "clip_eps_low": 0.05, "clip_eps_high": 0.05})
CLIPS: tuple[dict[str, Any], ...] = (
    {"dual_clip": 1.3},
    {"clip": "cispo", "clip_cap": 1.1},
    {"clip": "dis", "importance_band": [0.8, 1.25]},
    {"clip": "none"},
)
CORRECTIONS: tuple[dict[str, Any], ...] = tuple(
    {"correction": name} for name in ("tis", "tis-sequence", "icepop", "geometric", "decoupled")
)
PENALTIES = (
    {"coef": 0.3, "placement": "loss", "estimator": "k2"},
    {"coef": 0.3, "placement": "loss", "estimator": "k3"},
)


def algorithm(draw: random.Random, reduction: Any) -> Algorithm:
    """Any settings that go together."""
    settings = {"kind": "grpo", "reduction": reduction, "kl": draw.choice(PENALTIES)} | draw.choice(CLIPS)
    ratio = draw.choice(RATIOS)
    if settings.get("clip", "ppo") != "ppo":
        ratio = {name: value for name, value in ratio.items() if name == "ratio"}
    settings |= ratio if settings.get("clip") != "dis" else {}
    return parse(settings | (draw.choice(CORRECTIONS) if settings.get("clip") != "dis" else {})).sized(7)


def case(draw: random.Random, count: int) -> Case:
    """Ragged responses with gaps, some of which are left out whole; a response has one advantage for all tokens."""
    lengths = [draw.randint(1, 6) for _ in range(count)]
    new = [[draw.gauss(-1, 0.5) for _ in range(length)] for length in lengths]
    near = {
        name: [[value + draw.gauss(0, 0.2) for value in row] for row in new]
        for name in ("logprobs", "old_logprobs", "ref_logprobs")
    }
    advantages = [[draw.gauss(0, 1)] * length for length in lengths]
    marks = [
        [False] * length if draw.random() < 0.25 else [draw.random() < 0.75 for _ in range(length)]
        for length in lengths
    ]
    marks[0] = [True] * lengths[0]
    return Case(new, near | {"advantages": advantages}, marks)


def division(draw: random.Random, ranks: int) -> list[Division]:
    """Divides the trajectories of a minibatch among ranks, and those of each among passes, in any order."""
    seed = draw.random()

    def dealt(count: int) -> list[list[list[int]]]:
        again = random.Random(f"{seed} {count}")
        rows = again.sample(range(count), count)
        made: list[list[list[int]]] = [[[]] for _ in range(ranks)]
        for row in rows:
            passes = again.choice(made)
            passes.append([row]) if again.random() < 0.4 else passes[-1].append(row)
        return made

    return [lambda count, rank=rank: dealt(count)[rank] for rank in range(ranks)]  # type: ignore[misc]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["tokens", "trajectories", "constant"])
def test_any_division_has_the_same_loss_and_gradient(reduction: str, seed: int) -> None:
    """Into micro-batches, among ranks, into packed rows, in any order: NaN at all that is not trained on."""
    draw = random.Random(seed)
    for _ in range(10):
        settings, batch = algorithm(draw, reduction), case(draw, draw.randint(2, 9))
        loss, gradient = trained(batch, settings, kl_coef=0.3)
        assert gradient.isfinite().all()
        assert float(gradient.abs().max()) > 0
        for packing in (False, True):
            order = draw.sample(range(len(batch.new)), len(batch.new))
            ranks = division(draw, draw.randint(1, 3))
            other, its = trained(batch, settings, kl_coef=0.3, packing=packing, ranks=ranks, order=order)
            close(other, loss, 1e-9)
            close(its, gradient, 1e-6)  # factors are float32


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["tokens", "trajectories", "constant"])
def test_minibatches_have_the_gradient_of_the_batch_as_their_mean(reduction: str, seed: int) -> None:
    """Whatever their tokens, and where some have none that is trained on."""
    draw = random.Random(seed)
    for _ in range(10):
        settings, batch = algorithm(draw, reduction), case(draw, 8)
        _, gradient = trained(batch, settings, kl_coef=0.3)
        size = draw.choice([1, 2, 4])
        _, summed = trained(batch, settings, kl_coef=0.3, minibatch=size, packing=draw.random() < 0.5)
        close(summed / (8 // size), gradient, 1e-6)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("settings", [{}, {"kind": "gspo"}, {"clip": "cispo"}, {"kind": "dapo"}, {"clip": "none"}])
def test_at_ratio_one_every_clip_is_reinforce(settings: dict[str, Any], packing: bool) -> None:
    """The first step's gradient is -A / N at each of N tokens, whatever bounds the ratio."""
    batch = case(random.Random(1), 6)
    same = dict.fromkeys(("logprobs", "old_logprobs"), batch.new) | {"advantages": batch.numbers["advantages"]}
    section = {"kind": "grpo"} | settings | {"reduction": "tokens"}
    _, gradient = trained(Case(batch.new, same, batch.trained), parse(section), packing=packing)
    rows = zip(same["advantages"], batch.trained, strict=True)
    flat = [a * m for row, marks in rows for a, m in zip(row, marks, strict=True)]
    expected = -torch.tensor([0.0, *flat]) / sum(map(sum, batch.trained))
    close(gradient, expected, 1e-5)


def test_a_division_deals_every_trajectory_once() -> None:
    for ranks in (1, 2, 3):
        dealt = [each(7) for each in division(random.Random(ranks), ranks)]
        assert sorted(row for passes in dealt for one in passes for row in one) == list(range(7))
    assert list(whole(3)[0]) == [0, 1, 2]
