"""The file of a plan that goes on over several commands: lines of JSON, each on the disk before the next is written.

Its records, by `kind`: `run` (a command begins: machine and device), `begun`, `figure`, `ended` (with its outcome),
`skipped` (why) and `again`. A stage that was begun and not ended was cut off.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import append, mend, read

NAME = "figures.jsonl"
TOO_SLOW, CUT_OFF, FAILED, DONE = "too slow", "cut off", "failed", "done"
FINAL = {TOO_SLOW, FAILED, DONE}
"""Outcomes after which a stage is not tried again. A stage that was cut off ran out of its command's time."""
TRIES = 2


class Ledger:
    """Figures and outcomes in one file, and a copy of it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """The first of the paths counts; what it holds is copied to the others."""
        self.paths = tuple(dict.fromkeys(path.resolve() for path in paths))
        first, *others = self.paths
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        mend(first)
        first.touch()
        for other in others:
            other.write_bytes(first.read_bytes())

    def add(self, kind: str, **fields: Any) -> None:
        """Writes a record, with the time."""
        record = {"kind": kind, "at": round(time.time(), 1), **fields}
        for path in self.paths:
            append(path, record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records."""
        return read(self.paths[0])

    def tries(self, stage: str) -> tuple[int, str]:
        """Number of times that a stage was begun since it was last asked for, and its last outcome ('' for none)."""
        begun, outcome = 0, ""
        for record in self.records:
            if record.get("stage") != stage:
                continue
            if record["kind"] == "again":
                begun, outcome = 0, ""
            elif record["kind"] == "begun":
                begun, outcome = begun + 1, CUT_OFF
            elif record["kind"] == "ended":
                outcome = record["outcome"]
        return begun, outcome

    def marks(self) -> list[str]:
        """Marks of stages that were begun and not ended: their processes may still be there."""
        open_: dict[str, str] = {}
        for record in self.records:
            if record["kind"] == "begun":
                open_[record["stage"]] = record["mark"]
            elif record["kind"] == "ended":
                open_.pop(record["stage"], None)
        return list(open_.values())

    def failures(self, stage: str) -> bool:
        """True if the stage's last try gave nothing but errors."""
        rows: list[dict[str, Any]] = []
        for record in self.records:
            if record.get("stage") == stage and record["kind"] == "begun":
                rows = []
            elif record.get("stage") == stage and record["kind"] == "figure":
                rows.append(record)
        return bool(rows) and all("error" in row for row in rows)
