"""Makes a recipe's output once: cached by digest, written aside, then renamed into place. Writes prompts as JSONL."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from quartet.folders import replace_folder
from recipes.common.stages import Stages

RECORD = "recipe.json"

Build = Callable[[Path, Stages], Mapping[str, float]]
"""Writes a recipe's output into an empty directory and returns what it measured."""


def fingerprint(settings: Any, sources: Iterable[Path]) -> str:
    """SHA-256 over a settings dataclass and every Python file under `sources`, by content and name."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    for source in sources:
        files = [source] if source.is_file() else sorted(source.rglob("*.py"))
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def make_once(out: Path, settings: Any, sources: Sequence[Path], build: Build, console: Console) -> bool:
    """Runs `build` unless `out` already holds what it would make; returns whether it ran.

    An earlier output with other settings or from other sources is replaced, at the very end. Beside the
    build's own files `out` gets RECORD: settings, digest, measures, seconds per stage and the size of each
    file. Raises FileExistsError when `out` is neither new, nor empty, nor made by a recipe.
    """
    out = out.resolve()
    digest = fingerprint(settings, sources)
    if _is_made(out, digest):
        console.print(f"{out.name}: already made in {out}")
        return False
    _refuse_foreign(out)
    measures: dict[str, float] = {}

    def write(directory: Path) -> None:
        stages = Stages(console)
        measures.update(build(directory, stages))
        record = {
            "digest": digest,
            "settings": dataclasses.asdict(settings),
            "measures": measures,
            "seconds": stages.seconds,
            "files": _sizes(directory),
        }
        (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")

    replace_folder(out, write)
    for name, value in measures.items():
        console.print(f"{name:<32} {value:7.3f}")
    return True


def _is_made(out: Path, digest: str) -> bool:
    try:
        record = json.loads((out / RECORD).read_text())
        return bool(
            record["digest"] == digest
            and all((out / name).stat().st_size == size for name, size in record["files"].items())
        )
    except (OSError, ValueError, KeyError):
        return False


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not (out.is_dir() and ((out / RECORD).exists() or not any(out.iterdir()))):
        raise FileExistsError(f"out: {out} holds other things (no {RECORD}); name a new or empty directory")


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Writes `rows` to `path`, whose folder is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
