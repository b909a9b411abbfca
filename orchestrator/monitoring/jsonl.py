"""Parses our own JSONL and rejects damaged lines."""

import json
from typing import Any

from quartet.config.base import ConfigError

_DIGITS = 16
"""Most digits of a whole number; a double holds that many exactly."""


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `line`. ConfigError, which begins with `where`, if the line holds something else."""
    try:
        parsed = json.loads(line, parse_int=_whole)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    text = line if isinstance(line, str) else line.decode("utf-8", errors="replace")
    raise ConfigError(f"{where}: should be a JSON object, got {text[:80]!r}")


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a whole number with too many digits")
    return int(digits)
