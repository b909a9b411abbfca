"""Runs of trainings, and their data."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.training_runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Sequence[object]], str]:
    def written(name: str, rows: Sequence[object]) -> str:
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "data")

    return written
