"""The `quartet` command's own checks of what is typed."""

from pathlib import Path

from typer.testing import CliRunner

from orchestrator.cli import app


def test_a_number_of_samples_is_not_negative(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["report", "--samples", "-1", str(tmp_path)], env={"COLUMNS": "120", "TERM": "dumb"}
    )
    assert done.exit_code == 2
    assert "Invalid value for '--samples': -1 is not in the range x>=0." in done.output
