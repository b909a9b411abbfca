"""docs/before-ppo.md, run as it stands; and trainings that are killed, whose ends are the same bit for bit."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from orchestrator.loop.checkpoint_folder import complete
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import command
from tests.commands import PATIENCE_S, Command
from tests.pages import Page, shell, shorten
from tests.unit.training_runs import measured, rows, same, weights
from tests.untidy import make_untidy

PAGE = Page.at("before-ppo.md")
TRAININGS = 4
"""Commands of the page before those that need services."""
STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_untidy(tmp_path / "models" / "base")
    PAGE.write(tmp_path)
    yield tmp_path
    command(tmp_path, "down")


def check_trained(folder: Path) -> None:
    """Looks at what the trainings of the page left."""
    sft, reward = folder / "runs/sft", folder / "runs/reward"
    base = AutoModelForCausalLM.from_pretrained(folder / "models/base").state_dict()
    policy = AutoModelForCausalLM.from_pretrained(sft / "model").state_dict()
    assert base.keys() == policy.keys()
    assert any(not tensor.equal(base[name]) for name, tensor in policy.items())
    lines = read_metrics(sft / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7))  # 3 passes over 8 of 10 rows, 4 at a time
    assert lines[-1]["eval/loss_low"] < lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    scorer = AutoModelForSequenceClassification.from_pretrained(reward / "model")
    assert scorer.config.num_labels == 1
    assert scorer.config.reward_std > 0
    assert 0 <= read_metrics(reward / "metrics.jsonl")[-1]["eval/accuracy"] <= 1
    assert all((run / "report.html").is_file() for run in (sft, reward))


def test_the_page_leads_from_a_base_model_to_a_policy_and_a_reward_model(folder: Path) -> None:
    assert [line.split()[1] for line in PAGE.commands[:TRAININGS]] == ["sft", "report", "reward-model", "report"]
    for line in PAGE.commands[:TRAININGS]:
        shell(folder, line)
    check_trained(folder)


@pytest.mark.exhaustive  # the trainings as above, then a quartet of its own
def test_the_page_leads_from_a_base_model_to_ppo_and_its_evaluation(folder: Path) -> None:
    assert [line.split()[1] for line in PAGE.commands[TRAININGS:]] == [
        *("init", "check", "up", "train", "evaluate", "report", "down")
    ]
    for line in PAGE.commands:
        shell(folder, line)
        if line.startswith("quartet init"):
            shorten(folder / "ppo.yaml", STEPS)
    check_trained(folder)
    steps = read_metrics(folder / "runs/ppo/metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, STEPS]
    assert max(line["mismatch/mean_abs"] for line in steps[1:]) < 1e-4
    assert (folder / "runs/ppo/policy/model.safetensors").is_file()
    assert (folder / "runs/ppo/report.html").is_file()


def carried_out(folder: Path, *arguments: str) -> None:
    log = folder / "command.log"
    assert Command(folder, log, *arguments).wait(PATIENCE_S) == 0, log.read_text()


def killed(folder: Path, when: Callable[[], bool], *arguments: str) -> None:
    log = folder / "command.log"
    process = Command(folder, log, *arguments)
    end = time.monotonic() + PATIENCE_S
    while not when():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.001)
    process.kill()
    process.wait()


@pytest.mark.parametrize("name", ["sft", "reward-model"])
def test_a_training_that_is_killed_twice_ends_like_another(name: str, policy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name, 96)))
    fields = {
        "model": str(policy_folder),
        "data": "train.jsonl",
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"},
        "batch_size": 8,
        "checkpoint": {"every": 1},
        "log": {"tensorboard": False},
    }
    for run in ("whole", "killed"):
        (tmp_path / f"{run}.yaml").write_text(json.dumps(fields | {"name": run}))
    carried_out(tmp_path, name, "whole.yaml")
    folder = tmp_path / "runs/killed"

    def has_steps(count: int) -> Callable[[], bool]:
        return lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder / "metrics.jsonl")) >= count

    killed(tmp_path, has_steps(3), name, "killed.yaml")
    last = complete(folder / "checkpoints")[-1].name
    killed(tmp_path, has_steps(7), name, "killed.yaml", "--resume")
    assert complete(folder / "checkpoints")[-1].name > last
    carried_out(tmp_path, name, "killed.yaml", "--resume")
    assert "resuming runs/killed after step" in (tmp_path / "command.log").read_text()
    assert measured(folder) == measured(tmp_path / "runs/whole")
    assert same(weights(folder / "model"), weights(tmp_path / "runs/whole/model"))
