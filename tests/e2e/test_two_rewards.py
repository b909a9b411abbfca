"""Runs through the real services that train on two named rewards, of one scorer of several and one file of examples/,
and whose prompts have tasks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from orchestrator.experience.experience import schema_of
from orchestrator.loop.checkpoint_folder import latest
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import Quartet
from tests.commands import finished
from tests.runs import Run, assert_same, journal, write_rows

STEPS, BATCH = 3, 16
NAMES = ["right", "brief"]
REWARDS = {"right": {"weight": 2.0}, "brief": {"weight": [[1, 0.1], [3, 0.5]], "normalise": "running", "clip": 4.0}}


@pytest.fixture(scope="module")
def named(quartet: Quartet) -> Iterator[dict[str, Any]]:
    """Another reward application: of the example, and of a scorer that only others ask."""
    rules = {"kind": "function", "function": "examples.two_rewards:score", "names": NAMES}
    words = {"kind": "function", "function": "tests.scorers:count"}
    with quartet.scoring("named", scorers={"rules": rules, "words": words}) as application:
        yield application


def run_of(quartet: Quartet, named: dict[str, Any], name: str, rewards: dict[str, Any]) -> Run:
    """A run that these rewards train, by a service beside that of other runs."""
    run = Run(quartet, name, rewards=rewards)
    rows = [{"prompt": f"w{4 + n} w{5 + n}", "label": f"w{4 + n}", "kind": ["even", "odd"][n % 2]} for n in range(40)]
    prompts = write_rows(quartet, "with-tasks.jsonl", rows)
    keys = {"label_key": "label", "task_key": "kind", "columns": ["kind"], "max_prompt_length": 16}
    with run.changing() as raw:
        raw["applications"].append(named)
        raw["orchestrator"] |= {
            "steps": STEPS,
            "services": {"reward": {"application": "named", "scorer": "rules"}},
            "data": {"path": str(prompts), **keys},
        }
    return run


@pytest.fixture(scope="module")
def straight(quartet: Quartet, named: dict[str, Any]) -> Run:
    """A run that nothing happened to."""
    run = run_of(quartet, named, "two-rewards", REWARDS)
    run.finish()
    return run


def test_both_names_are_scored_weighed_measured_and_kept(straight: Run) -> None:
    lines = read_metrics(straight.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    seen: list[float] = []
    for line, columns, weight in zip(lines, journal(straight, schema_of(NAMES)), (0.1, 0.3, 0.5), strict=True):
        right, brief = columns["score/right"], columns["score/brief"]
        assert {*right.tolist()} <= {0.0, 1.0}
        assert (brief < 0).all()
        assert np.allclose(columns["score"], 2 * right.astype(float) + weight * brief.astype(float), atol=1e-6)
        assert line["score/brief/weight"] == pytest.approx(weight)
        for name, scores in (("score/right", right), ("score/brief", brief), ("score", columns["score"])):
            assert line[f"{name}/mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
            assert line[f"{name}/std"] == pytest.approx(float(scores.std()), abs=1e-5)
        # The reward of a response: its score by both names, the second normalised, and the KL penalty.
        seen += brief.tolist()
        normalised = np.clip((brief - np.mean(seen)) / np.std(seen, ddof=1), -4, 4)
        expected = np.clip(2 * right + weight * normalised, -10, 10).mean() - line["kl/coef"] * line["kl/reference"]
        assert line["reward/mean"] == pytest.approx(float(expected), abs=1e-3)
        tasks = {task: line[f"task/{task}/samples"] for task in ("even", "odd")}
        assert sum(tasks.values()) == BATCH
        whole = sum(count * line[f"task/{task}/score/mean"] for task, count in tasks.items()) / BATCH
        assert whole == pytest.approx(line["score/mean"], abs=1e-5)
        assert line["policy/grad_norm"] > 0
    last = latest(straight.folder / "checkpoints")
    assert last is not None
    assert last.state.normalisers.keys() == {"brief"}
    assert last.state.normalisers["brief"].mean == pytest.approx(float(np.mean(seen)), abs=1e-6)


def test_one_that_is_killed_ends_with_the_same_weights(
    quartet: Quartet, named: dict[str, Any], straight: Run
) -> None:
    """With the checkpoint of step 2, after which it goes on from there; from the same policy and samples."""
    again = run_of(quartet, named, "two-again", REWARDS)
    again.take_samples(straight)
    try:
        again.killed((again.folder / "checkpoints" / "step-000002").exists, "--resume")
        again.finish("--resume")
        assert_same(again, straight)
    finally:
        again.end()


def test_check_names_what_has_no_weight_and_the_report_draws_each_name(
    quartet: Quartet, named: dict[str, Any], straight: Run
) -> None:
    code, told = finished(quartet.folder, "check", str(straight.config))
    assert code == 0, told
    wrong = run_of(quartet, named, "two-wrong", {"right": {}, "kind": {}})
    code, told = finished(quartet.folder, "check", str(wrong.config))
    assert code != 0
    told = " ".join(told.split())
    assert (
        "orchestrator.algorithm.rewards: lacks brief, as applications.named.args.scorers.rules gives right, brief"
        in told
    )
    assert (
        "orchestrator.algorithm.rewards: has kind, but applications.named.args.scorers.rules gives right, brief"
        in told
    )
    code, told = finished(quartet.folder, "report", str(straight.folder))
    assert code == 0, told
    page = (straight.folder / "report.html").read_text()
    for title in ("Scores by name", "Score by task", "Length by task"):
        assert page.count(f"<h3>{title}</h3>") == 1
