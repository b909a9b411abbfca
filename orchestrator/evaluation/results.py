"""One evaluated response, and the JSONL files that hold them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from orchestrator.monitoring.jsonl import parse_object, whole
from quartet.config.base import ConfigError
from quartet.config.explain import shown
from quartet.folders import naming


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One response of an evaluation."""

    row: int
    """The prompt's row in its split."""
    prompt: str
    response: str
    label: str
    """The data set's label of the prompt; empty when none."""
    ended: bool
    """True if the response ended by itself and was not cut off at the length limit."""
    task: str
    """The data set's task of the prompt; empty when none."""
    score: float
    """Score of the reward service, of several named ones the weighted sum; NaN, in JSON null, if it has none."""
    scores: dict[str, float]
    """Name -> score, where they have names."""
    kl: float
    """KL to the reference, in nats, summed over the response; NaN, in JSON null, where the run has none."""
    length: int
    """Length in tokens."""
    judges: dict[str, float]
    """Judge -> its score."""

    @classmethod
    def parse(cls, line: str | bytes, where: str) -> Self:
        """Reads one line of an evaluation file. ConfigError, which begins with `where`, if the line is wrong."""
        where = f"{where}: not a sample of an evaluation"
        raw = {"label": "", **parse_object(line, where, parse_int=whole)}
        values = {}
        for each in fields(cls):
            if each.name not in raw:
                raise ConfigError(f"{where}: {each.name}: required")
            values[each.name] = _checked(raw[each.name], each.type, f"{where}: {each.name}")
        return cls(**values)


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    float: ((int, float, type(None)), "a number or null"),
    dict[str, float]: ((dict,), "a mapping of names to numbers"),
}
"""Type of a field -> its types in JSON, and these in words."""


def _checked(value: Any, kind: Any, where: str) -> Any:
    """The value of a field of this type. ConfigError, which begins with `where`, if JSON has something else there."""
    kinds, words = _KINDS[kind]
    if type(value) not in kinds:
        raise ConfigError(f"{where}: should be {words}, got {shown(value)}")
    if kind is float:
        return math.nan if value is None else float(value)
    if isinstance(value, dict):
        return {name: _checked(number, float, f"{where}.{name}") for name, number in value.items()}
    return value


def _plain(number: float) -> float | None:
    return None if math.isnan(number) else number


def write_rows(path: Path, rows: Sequence[EvaluatedSample]) -> None:
    """Writes one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = [
        asdict(row)
        | {"kl": _plain(row.kl), "score": _plain(row.score)}
        | {"scores": {name: _plain(score) for name, score in row.scores.items()}}
        for row in rows
    ]
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in raw]
    with naming(path):
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> list[EvaluatedSample]:
    """Reads a file of write_rows. ConfigError names a line that is wrong."""
    lines = path.read_bytes().split(b"\n")
    return [EvaluatedSample.parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]
