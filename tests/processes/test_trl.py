"""Losses beside TRL's own: those of GRPOTrainer on the same numbers, and those of RewardTrainer from the same start
and on the same batches."""

import json
import math
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.vs_trl.sides import make_environment
from orchestrator.algorithms.registry import parse
from orchestrator.commands.supervised import read_inputs
from orchestrator.supervised.registry import TRAININGS
from tests.unit.bare_learner import Case, trained
from tests.unit.reference_ppo import close
from tests.unit.training_runs import Runs, measured, rows

TESTS = Path(__file__).parents[1]
STEPS, SIZE, RATE, CENTRING = 20, 4, 3e-4, 0.01
LONGEST, LOW, HIGH = 9, 0.2, 0.28


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with TRL in it."""
    return make_environment(tmp_path_factory.mktemp("trl") / "environment", "grpo")


def peer(python: Path, name: str, settings: Any) -> list[dict[str, Any]]:
    """The lines of JSON that a program beside TRL prints."""
    environment = {variable: value for variable, value in os.environ.items() if variable != "PYTHONPATH"}
    command, given = [str(python), str(TESTS / name)], json.dumps(settings)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"loss"')]


K3 = {"kl": {"coef": 0.04, "placement": "loss", "estimator": "k3"}}
ASYMMETRIC = {"clip_eps_low": LOW, "clip_eps_high": HIGH}
BOUNDS = {"epsilon_low": LOW, "epsilon_high": HIGH}
PAIRS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"reduction": "trajectories", **ASYMMETRIC}, {"loss_type": "grpo", **BOUNDS}),
    ({"reduction": "tokens", **ASYMMETRIC}, {"loss_type": "dapo", **BOUNDS}),
    ({"reduction": "tokens", **ASYMMETRIC}, {"loss_type": "bnpo", **BOUNDS}),
    ({"reduction": "constant", **ASYMMETRIC}, {"loss_type": "dr_grpo", **BOUNDS}),
    ({"dual_clip": 1.4, **ASYMMETRIC}, {"delta": 1.4, **BOUNDS}),
    (K3 | ASYMMETRIC, {"beta": 0.04, **BOUNDS}),
    (
        {"ratio": "sequence", "clip_eps_low": 0.05, "clip_eps_high": 0.06},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
    ({"reduction": "tokens", "clip": "cispo", "clip_cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    (
        {"reduction": "tokens", "importance_cap": 1.1, **ASYMMETRIC},
        {"loss_type": "dapo", "use_vllm": True, **BOUNDS},
    ),
)
"""Settings of ours, and the settings of TRL that are the same loss."""


@pytest.mark.exhaustive  # the same formulas, written again: tests/unit/orchestrator/policy/test_elsewhere.py
def test_losses_and_gradients_are_those_of_trls_grpo_trainer(python: Path) -> None:
    """Ragged responses, in float64; then with one of which nothing is trained on, which TRL's grpo and dr_grpo count
    among the rows of their mean, and ours do not."""
    made = [(ours, theirs, case(seed, out)) for ours, theirs in PAIRS for seed in range(4) for out in (False, True)]
    asked = [
        dict(one.numbers)
        | {"new": one.new, "trained": [[float(mark) for mark in row] for row in one.trained]}
        | {"weights": capped(one, ours.get("importance_cap", math.inf))}
        | {"settings": theirs | {"max_completion_length": LONGEST}}
        for ours, theirs, one in made
    ]
    answers = peer(python, "loss_peer.py", asked)
    assert len(answers) == len(made)
    for (ours, theirs, one), answer in zip(made, answers, strict=True):
        algorithm = parse({"kind": "grpo", "correction": "tis", "importance_cap": None} | ours).sized(LONGEST)
        loss, gradient = trained(one, algorithm, kl_coef=algorithm.kl.coef)
        count, left_out = len(one.new), sum(not any(row) for row in one.trained)
        by_rows = theirs.get("loss_type", "grpo") in ("grpo", "dr_grpo")
        factor = count / (count - left_out) if by_rows else 1.0
        close(loss, factor * answer["loss"], 1e-6)
        close(gradient[1:], [factor * each for each in answer["gradient"]], 1e-6)
        assert max(map(abs, answer["gradient"])) > 1e-3


def case(seed: int, left_out: bool) -> Case:
    """Eight responses of 1 to 7 tokens, numbers as float32 has them; the last is not trained on if asked for."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 7) for _ in range(8)]

    def near(rows: list[list[float]], by: float) -> list[list[float]]:
        return [[float(np.float32(value + draw.gauss(0, by))) for value in row] for row in rows]

    new = near([[-1.0] * count for count in counts], 0.5)
    names = ("logprobs", "old_logprobs", "ref_logprobs")
    advantages = [[float(np.float32(draw.gauss(0, 1)))] * count for count in counts]
    marks = [[not (left_out and row == 7)] * count for row, count in enumerate(counts)]
    return Case(new, {name: near(new, 0.3) for name in names} | {"advantages": advantages}, marks)


def capped(one: Case, cap: float) -> list[list[float]]:
    """min(exp(old - engine's), cap) of each token: the weights that TRL multiplies with."""
    rows = zip(one.numbers["old_logprobs"], one.numbers["logprobs"], strict=True)
    return [[min(math.exp(o - e), cap) for o, e in zip(old, engine, strict=True)] for old, engine in rows]


@pytest.mark.exhaustive  # the same formula, written again: tests/unit/orchestrator/supervised/test_numerics.py
def test_twenty_steps_have_the_losses_of_trl(python: Path, reward_folder: Path, tmp_path: Path) -> None:
    drawn = [row | {"by": index / 80} for index, row in enumerate(rows("reward-model", STEPS * SIZE))]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    fields = {
        "name": "mine",
        "model": str(reward_folder),
        "data": {"path": str(tmp_path / "train.jsonl"), "margin_key": "by"},
        "optimizer": {"learning_rate": RATE},
        "shuffle": False,
        "batch_size": SIZE,
        "centring": CENTRING,
        "log": {"tensorboard": False},
    }
    examples = read_inputs(TRAININGS["reward-model"].parse(fields, "")).train.columns
    ids = [row.tolist() for row in examples.rows("ids")]
    each = zip(ids[::2], ids[1::2], examples["margin"][::2].tolist(), strict=True)
    same_rows = [{"chosen_ids": chosen, "rejected_ids": rejected, "margin": by} for chosen, rejected, by in each]
    settings = {"model": str(reward_folder), "rows": same_rows, "steps": STEPS, "batch": SIZE, "rate": RATE}
    settings |= {"centring": CENTRING, "output": str(tmp_path / "trl")}
    theirs = [line["loss"] for line in peer(python, "reward_peer.py", settings)]
    ours = [line["train/loss"] for line in measured(Runs(tmp_path).run("reward-model", fields))]
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-5)
