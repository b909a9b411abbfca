"""The reward model's training beside TRL's RewardTrainer, from the same start and on the same batches."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.commands.supervised import read_inputs
from orchestrator.supervised.registry import TRAININGS
from tests.unit.training_runs import Runs, measured, rows

PEER = Path(__file__).parents[1] / "reward_peer.py"
STEPS, SIZE, RATE, CENTRING = 20, 4, 3e-4, 0.01


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with TRL in it."""
    # Imported here, as it imports torch, which the process that divides the tests need not.
    from benchmarks.vs_trl.sides import make_environment

    return make_environment(tmp_path_factory.mktemp("trl") / "environment")


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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(PEER), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    theirs = [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith('{"loss"')]
    ours = [line["train/loss"] for line in measured(Runs(tmp_path).run("reward-model", fields))]
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-5)
