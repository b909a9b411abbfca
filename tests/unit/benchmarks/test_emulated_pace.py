"""The arithmetic behind benchmarks/pipeline: what a step takes at least."""

from pathlib import Path

import pytest

from benchmarks.emulated.pace import CASES, Pace
from benchmarks.pipeline import ratios

# 4 s of generation; then values, the slowest of 0.25, 0.5 and 1 s; log-probs 0.5 s; the critic's training, the slower
# with 2.5 s; a copy of 0.25 s and a delivery of 1.25 s.
PACE = Pace(
    generate=4, score=0.25, reference=0.5, values=1, logprobs=0.5,
    train=2, train_critic=2.5, stage=0.25, deliver=1.25,
)  # fmt: skip


def test_the_critical_path_adds_up_what_follows_one_another_at_lock_step() -> None:
    assert PACE.critical_path == 4 + 1 + 0.5 + 2.5 + 0.25 + 1.25


def test_values_and_log_probs_are_the_learners_stage_when_sampling_is_ahead() -> None:
    assert PACE.stages == {"rollout": 4, "scoring": 0.5, "learner": 1 + 2.5 + 0.25, "push": 1.25}
    assert PACE.slowest_stage == 4


@pytest.mark.parametrize("name", CASES)
def test_a_case_takes_one_unit_and_is_bound_by_what_it_is_named_after(name: str) -> None:
    pace = CASES[name]
    assert pace.critical_path == pytest.approx(1)
    assert pace.times(5).critical_path == pytest.approx(5)
    bound = {"generation-bound": "rollout", "training-bound": "learner", "reward-bound": "scoring"}[name]
    assert pace.stages[bound] == pace.slowest_stage > 0.5


def test_ratios_are_to_the_critical_path_and_to_the_slowest_stage() -> None:
    # 9.5 s and 4 s are the least; 9.975 / 9.5 = 1.05 and 4.6 / 4 = 1.15.
    assert ratios(PACE, {0: 9.975, 1: 4.6}) == ["1.050", "1.150 !", "0.461", "0.421"]


def test_a_pace_is_read_as_it_was_written(tmp_path: Path) -> None:
    PACE.write(tmp_path / "pace.json")
    assert Pace.read(tmp_path / "pace.json") == PACE
