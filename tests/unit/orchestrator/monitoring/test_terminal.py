"""Text of models and services on a terminal is harmless: in `quartet report`, and in the notes of a run."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli import _guarded, app
from orchestrator.monitoring.progress import PlainProgress, RichProgress
from orchestrator.monitoring.terminal import printable
from quartet.wire.errors import Internal

TITLE = "\x1b]0;owned\x07"
"""Sets the title of most terminals."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字 and 🎭", "plain, ünïcode, 漢字 and 🎭"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        (TITLE, r"\x1b]0;owned\x07"),
        ("\x1b[2J\x9b2J\rover\x08", r"\x1b[2J\x9b2J\rover\x08"),
        ("right\u202eto left", r"right\u202eto left"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_what_is_not_shown_but_obeyed_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_samples_of_a_report_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "evaluations").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "eval/score": 1.0}\n')
    for step in (0, 2):
        row = {"row": 0, "prompt": f"p{TITLE}", "response": f"r{TITLE}", "score": 1.0, "judges": {}}
        row |= {"kl": 0.0, "length": 1, "ended": True, "sample": 0, "task": "", "scores": {}}
        (run / "evaluations" / f"step-{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
    done = CliRunner().invoke(app, ["report", "--samples", "1", str(run)])
    assert done.exit_code == 0, done.output
    assert r"p\x1b]0;owned\x07" in done.output
    assert r"r\x1b]0;owned\x07" in done.output
    assert "\x07" not in done.output


def test_errors_of_a_service_do_not_reach_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise Internal(f"reward said {TITLE}")

    assert _guarded(command) == 1
    assert r"reward said \x1b]0;owned\x07" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_notes_of_a_run_do_not_reach_the_terminal_raw(kind: str) -> None:
    stream = io.StringIO()
    make: Any = {"plain": PlainProgress, "live": lambda out: RichProgress(Console(file=out, width=200))}[kind]
    make(stream).note(f"interrupted ({TITLE})")
    assert r"interrupted (\x1b]0;owned\x07)" in stream.getvalue()
