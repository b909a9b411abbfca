"""Runs whose file has no critic: they learn from scores alone, and leave a critic alone."""

import pytest

from orchestrator.loop.checkpoint_folder import latest
from orchestrator.monitoring.metrics import read_metrics
from quartet.folders import MARKER
from tests.cluster import Quartet
from tests.commands import finished
from tests.runs import STEPS, Run

EACH = 4
RLOO = {"kind": "rloo", "samples_per_prompt": EACH, "scale": "none"}


@pytest.fixture(scope="module")
async def straight(quartet: Quartet) -> Run:
    """A run that nothing happened to, beside a critic of another run."""
    before = await quartet.critic.info(30)
    run = Run(quartet, "alone", without=["critic"], **RLOO)
    run.finish()
    after = await quartet.critic.info(30)
    assert (after.last_step, after.held.lease) == (before.last_step, before.held.lease)
    return run


def test_the_policy_learns_and_nothing_is_said_of_values(straight: Run) -> None:
    lines = read_metrics(straight.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert not [name for name in line if name.startswith("value/")]
        assert line["policy/grad_norm"] > 0
        assert line["score/std"] > 0
    assert {"score/mean", "kl/reference", "policy/loss"} <= lines[0].keys()


def test_its_checkpoints_hold_the_policy_alone(straight: Run) -> None:
    last = latest(straight.folder / "checkpoints")
    assert last is not None
    assert last.state.first_critic_step is None
    assert {path.name for path in last.folder.iterdir()} - {MARKER} == {"policy", "state.json"}


def test_its_file_is_fine_and_its_report_shows_no_value_function(quartet: Quartet, straight: Run) -> None:
    code, told = finished(quartet.folder, "check", str(straight.config))
    assert code == 0, told
    # The quartet that runs here has one, which deploying this file would stop.
    assert not [line for line in told.splitlines() if "critic" in line and not line.startswith("after `quartet up`")]
    code, told = finished(quartet.folder, "report", str(straight.folder))
    assert code == 0, told
    page = (straight.folder / "report.html").read_text()
    assert "Entropy" in page
    assert "explained variance" not in page
