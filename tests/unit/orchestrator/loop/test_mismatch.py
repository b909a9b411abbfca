"""A mismatch that stays is told, and ends the run."""

from pathlib import Path

import pytest

from orchestrator.config.loop import LoopConfig
from orchestrator.loop.mismatch import MismatchError, MismatchWatch
from tests.unit.fake_run import Stage


def measured(mean_abs: float) -> dict[str, float]:
    return {"mismatch/present_mean_abs": mean_abs, "mismatch/max_abs": 2.5, "mismatch/kl": 0.25}


def test_steps_in_a_row_beyond_the_limit_end_the_run() -> None:
    notes: list[str] = []
    watch = MismatchWatch(LoopConfig(mismatch_steps=3), "float32", notes.append)
    for step, actual in enumerate([0.004, 0.03, 0.04, 0.01, 0.03, 0.04], 1):
        watch.check(step, measured(actual))
    said = "mismatch/present_mean_abs is 0.03 nats, beyond loop.mismatch_limit 0.02"
    assert notes[0] == f"step 2: {said} (1 of 3 steps in a row)"
    assert [note[:6] for note in notes] == ["step 2", "step 3", "step 5", "step 6"]
    with pytest.raises(
        MismatchError, match=r"^step 7: .* is nan nats.*\(3 of 3 .* 2.5 nats, KL 0.25\); .*mismatch_limit$"
    ):
        watch.check(7, measured(float("nan")))


@pytest.mark.parametrize(
    ("dtype", "first", "limit"),
    [
        ("float32", 1e-6, 0.001),
        ("float32", 1e-3, 0.005),
        ("float32", 0.01, 0.02),
        ("bfloat16", 0.003, 0.05),
        ("bfloat16", 0.02, 0.1),
        ("bfloat16", 0.1, 0.2),
    ],
)
def test_the_limit_is_five_times_the_first_measurement(dtype: str, first: float, limit: float) -> None:
    notes: list[str] = []
    watch = MismatchWatch(LoopConfig(), dtype, notes.append)
    for step, actual in enumerate([first, limit * 0.99, limit * 1.01], 1):
        watch.check(step, measured(actual))
    assert [note[:6] for note in notes] == ["step 3"]
    assert f"loop.mismatch_limit {limit:g} " in notes[0]


def test_rounding_in_half_precision_and_age_are_not_a_mismatch() -> None:
    notes: list[str] = []
    for watch in (
        MismatchWatch(LoopConfig(mismatch_steps=1), "bfloat16", notes.append),
        MismatchWatch(LoopConfig(mismatch_steps=1, mismatch_limit=0.11), "float32", notes.append),
    ):
        watch.check(1, measured(0.1))
        watch.check(2, {"mismatch/mean_abs": 5.0})  # all tokens are of older versions
    assert notes == []


async def test_a_run_ends_after_it_told_of_its_steps(policy_folder: Path) -> None:
    stage = Stage(policy_folder, steps=9, loop={"mismatch_limit": 0.2, "mismatch_steps": 2})
    notes: list[str] = []
    stage.progress.note = notes.append  # type: ignore[assignment, method-assign]
    with pytest.raises(MismatchError, match=r"^step 2: mismatch/present_mean_abs is 0.25 nats, beyond"):
        await stage.run()
    assert len(notes) == 1
    assert sorted(stage.log.lines) == [0, 1, 2]  # what was measured is kept
