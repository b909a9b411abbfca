"""Figures as lines of JSON in files that a cut-off loses nothing of. Imports nothing that has to be installed.

A benchmark that runs as a stage of `benchmarks.lent` finds in its environment which files those are.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = "QUARTET_FIGURES"
"""Environment variable: the files, separated as in PATH. Without it only the benchmark's own file is written."""
STAGE = "QUARTET_STAGE"
"""Environment variable: the name of the stage."""
KEPT = "QUARTET_MODELS"
"""Environment variable: the folder of models that several stages read."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as the last line of the file, and returns when the disk has it."""
    line = json.dumps(record).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # One call, so that lines of several processes do not mix.
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def keep(what: str, figures: Mapping[str, Any]) -> None:
    """Writes a figure of the stage that this process belongs to, if it belongs to one."""
    record = {"kind": "figure", "stage": os.environ.get(STAGE, ""), "what": what, **figures}
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        append(Path(path), record)


def keep_file(path: Path, name: str) -> None:
    """Copies a file to where the figures of the stage are, if this process belongs to one."""
    for figures in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        shutil.copyfile(path, Path(figures).with_name(name))


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a line that was cut off while it was written; an empty list without a file."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def mend(path: Path) -> None:
    """Ends a last line that was cut off, so that the next record gets a line of its own."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
