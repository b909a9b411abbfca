"""Each kind learns a rule, from three draws of its samples; and groups without a spread do what is said of them.

    python -m pytest -q -s -m "" tests/unit/orchestrator/optimum/test_rule.py

A response scores 1 if it holds a certain token, else 0. What is expected of a policy is computed exactly, over all
responses: before training it is the same for all draws, so that the deviation over draws is all the error there is.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestrator.algorithms.registry import presets
from tests.unit import known_optimum as known
from tests.unit.learning import Learning

pytestmark = pytest.mark.exhaustive
SEEDS, STEPS, RATE, TOKEN = range(3), 14, 1e-3, 4
REWARDS = torch.tensor([[float(TOKEN in response) for response in known.RESPONSES]] * len(known.PROMPTS)).double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return known.make_model(tmp_path_factory.mktemp("rule"), 1, scale=0.1, layers=2)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Tensor:
    """Log-probs of a policy that has learned the rule."""
    learned = Learning(folder, section("grpo"), REWARDS, steps=3 * STEPS, rate=RATE, seed=9)
    learned.train()
    return learned.logprobs()


def section(kind: str, **more: Any) -> dict[str, Any]:
    """The kind with its own penalty, with four responses to a prompt where they are compared, and the usual clips
    where its own are made for the mean over thousands of tokens."""
    preset = presets()[kind]
    own: dict[str, Any] = {"samples_per_prompt": 4} if preset.needs_samples_per_prompt > 1 else {}
    own |= {"clip_eps_low": 0.2, "clip_eps_high": 0.2} if preset.ratio == "sequence" else {}
    return {"kind": kind} | own | more


def error(numbers: list[float]) -> float:
    """The standard error of their mean."""
    return float(stdev(numbers) / len(numbers) ** 0.5)


@pytest.mark.parametrize("kind", presets())
def test_every_kind_beats_the_untrained_policy_by_three_standard_errors(
    folder: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """A kind without scores learns from the reference as its teacher."""
    alone = presets()[kind].critic_only_steps
    reference = None if presets()[kind].score_weight else request.getfixturevalue("teacher")
    scores = list[float]()
    for seed in SEEDS:
        made = Learning(
            folder, section(kind), REWARDS, steps=STEPS + alone, rate=RATE, seed=seed, reference=reference
        )
        before = made.score()
        made.train()
        scores.append(made.score())
    told = f"{kind}: score {before:.3f}, after {STEPS} steps {mean(scores):.3f} +- {error(scores):.3f}"
    print(told)
    assert mean(scores) - before > 3 * error(scores), told
    assert mean(scores) - before > 0.1, told


def test_groups_without_a_spread_pull_to_the_reference_if_they_are_kept(folder: Path) -> None:
    """Such groups have no advantage, so that of them the penalty in the loss is all: with `keep` the policy ends
    nearer to the reference and scores less than with `leave-out`, from the same draws."""

    def trained(seed: int, **more: Any) -> Learning:
        settings = section("grpo", kl={"coef": 0.1}, **more)
        made = Learning(folder, settings, REWARDS, steps=2 * STEPS, rate=RATE, seed=seed)
        made.train()
        return made

    pairs = [[trained(seed, zero_variance=which) for which in ("keep", "leave-out")] for seed in SEEDS]
    measures: dict[str, Callable[[Learning], float]] = {"KL": Learning.divergence, "score": Learning.score}
    for name, measure in measures.items():
        differences = [measure(left_out) - measure(kept) for kept, left_out in pairs]
        told = f"leave-out less keep, {name}: {mean(differences):.4f} +- {error(differences):.4f}"
        print(told)
        assert mean(differences) > 3 * error(differences), told
