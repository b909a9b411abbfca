"""Runs whose file has no critic: they learn from scores alone, are killed and go on, and leave a critic alone."""

import shutil
from collections.abc import Iterator

import pytest

from orchestrator.loop.checkpoint_folder import latest
from orchestrator.monitoring.metrics import read_metrics
from quartet.folders import MARKER
from tests.cluster import Quartet, command
from tests.commands import finished
from tests.runs import STEPS, Run, assert_same

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


@pytest.fixture
def again(quartet: Quartet, straight: Run) -> Iterator[Run]:
    """A run that begins as the other did, with the same policy and samples."""
    run = Run(quartet, "alone-again", without=["critic"], **RLOO)
    (run.folder / "checkpoints").mkdir(parents=True)
    shutil.copytree(straight.folder / "checkpoints" / "step-000000", run.folder / "checkpoints" / "step-000000")
    shutil.copytree(straight.folder / "journal", run.folder / "journal")
    yield run
    run.end()


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


@pytest.mark.exhaustive  # as with a critic: test_resume.py
def test_a_run_killed_at_step_3_ends_as_one_that_was_not(straight: Run, again: Run) -> None:
    again.killed(again.reached(3), "--resume")
    again.finish("--resume")
    assert_same(again, straight)


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


@pytest.mark.exhaustive  # one more part that differs from the checkpoint's: tests/unit/orchestrator/commands
async def test_a_checkpoint_with_a_critic_is_not_gone_on_with_without_one(quartet: Quartet, straight: Run) -> None:
    """Tried the other way round too: without a critic in the checkpoint, with one in the file."""
    run = Run(quartet, "alone", samples_per_prompt=EACH)  # the same run, whose file has a critic again
    done = command(quartet.folder, "train", str(run.config), "--resume")
    assert done.returncode == 1
    said = done.stderr.replace("\n", " ")
    assert "critic.model: nothing when the checkpoint was taken" in said
