"""One evaluated response, and the JSONL files that hold them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from services.common.config import ConfigError


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
    def parse(cls, line: str, where: str) -> Self:
        """From one line of an evaluation file. ConfigError, beginning with `where`, if it is none."""
        try:
            raw = json.loads(line)
            return cls(
                row=raw["row"],
                prompt=raw["prompt"],
                response=raw["response"],
                label=raw.get("label", ""),
                ended=raw["ended"],
                score=_number(raw["score"]),
                kl=_number(raw["kl"]),
                length=raw["length"],
                judges={name: _number(value) for name, value in raw["judges"].items()},
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: not a sample of an evaluation: {error!r}") from None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def write_rows(path: Path, rows: Sequence[Judged]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> list[Judged]:
    """The inverse of write_rows. ConfigError names the line that is no sample."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Judged.parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]
