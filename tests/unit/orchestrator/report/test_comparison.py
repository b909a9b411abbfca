"""The comparison of a run's first evaluation with its last."""

from pathlib import Path

import pytest

from orchestrator.report.comparison import read_comparison
from orchestrator.report.page import sample_pairs
from tests.unit.runs_on_disk import evaluate, full_run, printed, sample


def test_several_responses_to_a_prompt_are_paired_in_order_and_averaged(tmp_path: Path) -> None:
    before = [sample(0, score=0.0), sample(0, score=2.0), sample(1, score=5.0), sample(7, score=9.0)]
    after = [sample(1, score=6.0), sample(0, score=1.0), sample(0, score=1.0), sample(1, score=0.0)]
    evaluate(tmp_path, 0, before)
    evaluate(tmp_path, 1, after)
    comparison = read_comparison(tmp_path)
    assert comparison is not None
    scores = [(pair.before.row, pair.before.score, pair.after.score) for pair in comparison.pairs()]
    # The second response to row 1, and row 7, have no counterpart.
    assert scores == [(0, 0.0, 1.0), (0, 2.0, 1.0), (1, 5.0, 6.0)]
    score = comparison.measures()[0]
    assert score.before is not None
    assert score.change is not None
    assert score.wins is not None
    # Over the prompts' means 1, 5 and 9, and over the differences' means 0 and 1.
    assert score.before.mean == 5.0
    assert score.change.mean == 0.5
    assert score.wins.mean == pytest.approx(2 / 3)


def test_values_that_are_missing_do_not_count(tmp_path: Path) -> None:
    evaluate(tmp_path, 0, [sample(0, score=None, judges={"gold": 1.0}), sample(1, score=1.0)])
    evaluate(tmp_path, 1, [sample(0, score=3.0), sample(1, score=2.0)])
    comparison = read_comparison(tmp_path)
    assert comparison is not None
    score, gold, *_ = comparison.measures()
    assert score.before is not None
    assert score.change is not None
    assert (score.before.mean, score.change.mean) == (1.0, 1.0)
    assert gold.before is not None
    assert gold.before.mean == 1.0
    assert (gold.name, gold.after, gold.change, gold.wins) == ("gold", None, None, None)


def test_the_summary_states_values_intervals_and_win_rates(tmp_path: Path) -> None:
    text = printed(full_run(tmp_path))
    assert all(len(line) <= 80 for line in text.splitlines())
    (heading,) = (line for line in text.splitlines() if "Before" in line)
    assert heading.split() == ["Before", "Step", "10", "Change", "Win", "rate"]
    (score,) = (line for line in text.splitlines() if "held-out score" in line)
    assert score.split() == ["held-out", "score", "−1.00", "1.00", "+2.00", "100", "%"]
    (gold,) = (line for line in text.splitlines() if "gold" in line)
    assert gold.split() == ["gold", "−0.50", "0.25", "+0.75", "100", "%"]
    # Wilson's lower bound for 8 of 8 is 8 / (8 + 3.8415) = 67.6 %.
    assert "[68, 100]" in text
    assert "KL to reference" in text


def test_the_summary_of_one_evaluation_or_none(tmp_path: Path) -> None:
    assert "No evaluation was recorded" in printed(tmp_path)
    evaluate(tmp_path, 0, [sample(0, score=-0.001)])
    (score,) = (line for line in printed(tmp_path).splitlines() if "held-out score" in line)
    # No minus sign before a zero, and no interval from one prompt.
    assert score.split() == ["held-out", "score", "0.00", "–", "–", "–"]
    assert sample_pairs(tmp_path) == []


def test_sample_pairs_are_taken_at_even_distances(tmp_path: Path) -> None:
    assert sample_pairs(tmp_path / "none") == []
    for step in (0, 1):
        evaluate(tmp_path, step, [sample(row) for row in range(10)])
    assert [pair.before.row for pair in sample_pairs(tmp_path)] == [0, 2, 4, 6, 8]
    assert [pair.after.row for pair in sample_pairs(tmp_path, n=3)] == [0, 3, 6]
    assert len(sample_pairs(tmp_path, n=99)) == 10
