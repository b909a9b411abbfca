import io
import math

import pytest
from rich.console import Console

from orchestrator.monitoring.progress import (
    Headline,
    PlainProgress,
    RichProgress,
    TimeLeft,
    duration,
    make_progress,
    who_waits,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_time_left_is_the_mean_of_the_last_ten_steps() -> None:
    left = TimeLeft(total_steps=20)
    assert left.update(1, 5.0) == 19 * 5.0
    assert left.update(2, 2.0) == 18 * 3.5
    for step in range(3, 12):
        latest = left.update(step, 1.0)
    # The last ten are 2.0 and nine times 1.0; the first step's 5.0 is forgotten.
    assert latest == pytest.approx(9 * 1.1)
    assert left.update(20, 1.0) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_headline_keeps_the_last_evaluation() -> None:
    headline = Headline()
    assert headline.update({"score/mean": 0.5, "kl/reference": 1.234}) == "score 0.50  KL 1.23"
    assert headline.update({"score/mean": -0.5, "kl/reference": -0.004}) == "score -0.50  KL 0.00"
    assert headline.update({"score/mean": math.nan}) == "score nan"
    # Judges go before the held-out score.
    evaluated = {"score/mean": 0.6, "eval/score": 0.4, "eval/gold": -0.2, "eval/gold_low": -0.3}
    assert headline.update(evaluated) == "score 0.60  gold -0.20"
    assert headline.update({"score/mean": 0.7}) == "score 0.70  gold -0.20"


def test_without_judges_the_headline_shows_the_held_out_score() -> None:
    headline = Headline()
    assert headline.update({"eval/score": 0.4, "eval/kl": 2.0}) == "held-out 0.40"
    assert headline.update({"score/mean": 0.7}) == "score 0.70  held-out 0.40"


def test_plain_progress_writes_a_line_per_step() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(40, 0)
    progress.note("evaluating")
    progress.before_training({"eval/score": -0.25})
    progress.step(3, {"score/mean": 0.512, "kl/reference": 3.5}, seconds_left=74)
    progress.stop()
    assert stream.getvalue().splitlines() == [
        "evaluating",
        "before training  held-out -0.25",
        "step 3/40  score 0.51  KL 3.50  held-out -0.25  1 min 14 s left",
    ]


WAITS = {"wait/policy/rollout": 0.382, "wait/policy/push": 0.1, "wait/rollout/push": 0.118, "wait/push/policy": 0.9}
SAID = "learner waited 38 % for samples, rollout 12 % for the push"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (WAITS, SAID),
        ({}, ""),
        ({"wait/policy/rollout": 0.004, "wait/rollout/critic": 0.5}, "rollout waited 50 % for the critic"),
        ({"wait/policy/scoring": 1.0}, "learner waited 100 % for scores"),
    ],
)
def test_who_waits_for_whom_is_one_plain_phrase(metrics: dict[str, float], said: str) -> None:
    assert who_waits(metrics) == said


def test_both_displays_say_who_waits_for_whom() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    rich = RichProgress(Console(file=terminal, force_terminal=True, width=80, color_system=None))
    for progress in (PlainProgress(plain), rich):
        progress.start(40, 0)
        progress.step(3, {"score/mean": 0.5, **WAITS}, seconds_left=5)
        progress.stop()
    assert plain.getvalue() == f"step 3/40  score 0.50  5 s left  ({SAID})\n"
    last = terminal.getvalue().splitlines()
    assert any("3/40" in line for line in last)
    assert SAID in last[-2]


def test_rich_progress_shows_the_step_the_figures_and_the_time_left() -> None:
    stream = io.StringIO()
    progress = RichProgress(Console(file=stream, force_terminal=True, width=120, color_system=None))
    progress.start(40, 0)
    progress.note("weights [bold]pushed[/bold]")
    progress.before_training({"eval/score": -0.25})
    progress.step(3, {"score/mean": 0.512, "kl/reference": 3.5, "eval/[red]gold": 0.25}, seconds_left=74)
    progress.stop()
    # Names and notes are text, not rich's markup.
    assert "weights [bold]pushed[/bold]" in stream.getvalue()
    assert "before training  held-out -0.25" in stream.getvalue()
    # After the last frame comes only the code that shows the cursor again.
    last = stream.getvalue().splitlines()[-2]
    for part in ("step", "3/40", "score 0.51  KL 3.50  [red]gold 0.25", "1 min 14 s left"):
        assert part in last


def test_a_terminal_gets_the_live_line_and_anything_else_plain_ones() -> None:
    assert isinstance(make_progress(Terminal()), RichProgress)
    assert isinstance(make_progress(io.StringIO()), PlainProgress)
