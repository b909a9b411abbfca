"""The spans and the shares of a run, as the loop and its collaborators record them."""

from collections import Counter
from pathlib import Path

import pytest

from orchestrator.tracing.samples import TRACKS
from orchestrator.tracing.shares import LOOPS
from orchestrator.tracing.spans import STEPS
from tests.unit.fake_run import Stage


@pytest.mark.parametrize("ahead", [0, 1])
async def test_every_stage_of_every_sample_is_recorded_once(policy_folder: Path, ahead: int) -> None:
    stage = Stage(policy_folder, loop={"max_staleness": ahead})
    await stage.run()
    for name, track in TRACKS.items():
        if name == "answer":  # of an environment, which this run has not
            continue
        spans = [span for span in stage.written if (span.name, span.track) == (name, track)]
        numbers = [span.args["sample"] for span in spans if "sample" in span.args]
        # Two in each of three steps. What runs ahead has its log-probs taken by the batch.
        assert sorted(numbers) == list(range(0 if ahead and name == "logprobs" else 6)), name
    trained = Counter((span.track, span.args["step"]) for span in stage.written if span.name == "train")
    assert trained == Counter((learner, step) for learner in ("policy", "critic") for step in (1, 2, 3))
    assert [span.name for span in stage.written if span.track == STEPS] == ["start", "step 1", "step 2", "step 3"]
    waits = Counter(span.name for span in stage.written if span.track == "loop")
    assert (waits["samples"], waits["training"]) == (3, 3)
    # At lock-step also for the last samples' log-probs, if these come after the scores.
    assert 3 <= waits["logprobs"] <= (3 if ahead else 6)
    assert waits["push"] == 5  # after each update, and before the two evaluations of later steps
    assert waits["evaluation"] == 3  # before the first step, after the second and the last


async def test_shares_of_a_run_add_up(policy_folder: Path) -> None:
    stage = Stage(policy_folder)
    await stage.run()
    windows = [span for span in stage.written if span.track == STEPS]
    for step, window in zip((1, 2, 3), windows[1:], strict=True):
        line = stage.log.lines[step]
        assert line["seconds/wall"] == window.ended - window.began
        assert sum(line[f"wait/loop/{what}"] for what in LOOPS) == pytest.approx(1)
    # Each window begins where the one before it ended.
    assert [window.began for window in windows[1:]] == [window.ended for window in windows[:-1]]
