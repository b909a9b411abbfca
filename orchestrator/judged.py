"""One evaluated response, and the JSONL files that hold them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from orchestrator.jsonl import parse_object
from services.common.config import ConfigError
from services.common.findings import shown


@dataclass(frozen=True, slots=True)
class Judged:
    """One response of an evaluation."""

    row: int
    """The prompt's row in its split."""
    prompt: str
    response: str
    label: str
    """The data set's label of the prompt; empty when none."""
    ended: bool
    """It ended by itself and was not cut off at the length limit."""
    score: float
    """From the reward service."""
    kl: float
    """To the reference, in nats, summed over the response."""
    length: int
    """In tokens."""
    judges: dict[str, float]
    """What each judge of the configuration said."""

    @classmethod
    def parse(cls, line: str | bytes, where: str) -> Self:
        """From one line of an evaluation file. ConfigError, beginning with `where`, if it is none."""
        where = f"{where}: not a sample of an evaluation"
        raw = {"label": "", **parse_object(line, where)}
        for name, kinds, words in _FIELDS:
            if name not in raw:
                raise ConfigError(f"{where}: {name}: required")
            if type(raw[name]) not in kinds:
                raise ConfigError(f"{where}: {name}: should be {words}, got {shown(raw[name])}")
        judges = {name: _number(value, f"{where}: judges.{name}") for name, value in raw["judges"].items()}
        fields = {name: raw[name] for name, _, _ in _FIELDS}
        numbers = {name: _number(raw[name], f"{where}: {name}") for name in ("score", "kl")}
        return cls(**fields | numbers | {"judges": judges})


_NUMBER = (int, float, type(None))
_FIELDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("row", (int,), "a whole number"),
    ("prompt", (str,), "text"),
    ("response", (str,), "text"),
    ("label", (str,), "text"),
    ("ended", (bool,), "true or false"),
    ("score", _NUMBER, "a number or null"),
    ("kl", _NUMBER, "a number or null"),
    ("length", (int,), "a whole number"),
    ("judges", (dict,), "a mapping of names to numbers"),
)
"""Of a Judged in JSON: name, types, and these in words."""


def _number(value: Any, where: str) -> float:
    if type(value) not in _NUMBER:
        raise ConfigError(f"{where}: should be a number or null, got {shown(value)}")
    return math.nan if value is None else float(value)


def write_rows(path: Path, rows: Sequence[Judged]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> list[Judged]:
    """The inverse of write_rows. ConfigError names the line that is no sample."""
    lines = path.read_bytes().split(b"\n")
    return [Judged.parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]
