"""Runs through the real services whose scorer breaks on some prompts and gives NaN for others."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from orchestrator.loop.checkpoint_folder import latest
from orchestrator.monitoring.metrics import read_metrics
from services.reward.client import RewardClient
from tests.cluster import Quartet
from tests.commands import PATIENCE_S
from tests.runs import Run, journal, write_rows, written

STEPS, BATCH, PROMPTS = 3, 16, 40
LABELS = dict.fromkeys(range(0, PROMPTS, 5), "breaks") | dict.fromkeys(range(1, PROMPTS, 7), "nan")
"""Row -> label, of those without a score."""


@pytest.fixture(scope="module")
def spotty(quartet: Quartet) -> Iterator[dict[str, Any]]:
    """Another reward application, which runs."""
    with quartet.scoring("spotty", scorer={"kind": "function", "function": "tests.scorers:spotty"}) as application:
        yield application


def run_of(quartet: Quartet, application: dict[str, Any], name: str, **unscored: Any) -> Run:
    """A run whose prompts have these labels."""
    run = Run(quartet, name)
    rows = [{"prompt": f"w{4 + row} w{5 + row}", "label": LABELS.get(row, "")} for row in range(PROMPTS)]
    prompts = write_rows(quartet, "spotty.jsonl", rows)
    with run.changing() as raw:
        raw["applications"].append(application)
        raw["orchestrator"] |= {
            "steps": STEPS,
            "services": {"reward": {"application": "spotty"}},
            "data": {"path": str(prompts), "label_key": "label", "max_prompt_length": 16},
            "unscored": unscored,
        }
    return run


async def test_one_pair_that_breaks_costs_no_other_its_score(quartet: Quartet, spotty: dict[str, Any]) -> None:
    client = RewardClient(quartet.channel, "spotty")
    labels = ["", "breaks", "nan", ""] * 150  # more than one call holds
    scores = await client.score_texts(["w5"] * 600, ["w7 w8"] * 600, labels=labels, timeout_s=120)
    assert np.isnan(scores.values).tolist() == [bool(label) for label in labels]
    assert {*scores.values[~np.isnan(scores.values)].tolist()} == {2.0}
    told = {row: str(each) for row, each in scores.unscored.items()}
    assert [*told] == [row for row, label in enumerate(labels) if label]
    assert told[1].startswith("failed: tests.scorers:spotty raised ValueError in line ")
    assert told[2] == "not finite: tests.scorers:spotty gave a score that is not finite in float32"
    assert not [each for each in told.values() if "1234" in each]


def test_a_run_drops_what_has_no_score_and_its_ledger_is_exact(quartet: Quartet, spotty: dict[str, Any]) -> None:
    run = run_of(quartet, spotty, "drops", retries=1, then="drop")
    run.finish()
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    used, dropped = [], 0
    for line, columns, each in zip(lines, journal(run), written(run), strict=True):
        assert not {*columns["row"].tolist()} & LABELS.keys()
        assert line["score/mean"] == pytest.approx(float(columns["score"].mean()))
        assert {row for _, row, _ in each["discarded"]} <= LABELS.keys()
        assert np.isnan([score for _, _, score in each["discarded"]]).all()
        assert line["samples/unscored"] == line["samples/discarded"] == len(each["discarded"])
        assert line["samples/asked"] == BATCH + len(each["discarded"])
        used += columns["number"].tolist() + [number for number, _, _ in each["discarded"]]
        dropped += len(each["discarded"])
    assert dropped > 0
    assert sorted(used) == list(range(STEPS * BATCH + dropped))
    said = " ".join(run.log.read_text().split())
    assert said.count("; dropped") == dropped
    assert "has no score: failed: tests.scorers:spotty raised ValueError in line" in said
    last = latest(run.folder / "checkpoints")
    assert last is not None
    assert not last.state.prompts_seen & LABELS.keys()


def test_a_run_that_drops_none_ends_with_the_prompt_the_outcome_and_the_reason(
    quartet: Quartet, spotty: dict[str, Any]
) -> None:
    run = run_of(quartet, spotty, "ends", retries=0)
    process = run.start()
    try:
        assert process.wait(PATIENCE_S) == 1
        said = " ".join(run.log.read_text().split())
        assert "error: reward.Score: sample" in said
        assert "has no score: failed: tests.scorers:spotty raised" in said or "has no score: not finite:" in said
        assert "orchestrator.unscored.then to drop" in said
        assert "interrupted (" not in said
        assert run.steps() == []
    finally:
        run.end()
