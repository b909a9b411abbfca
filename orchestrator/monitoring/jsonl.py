"""Parses a line of JSONL and rejects a damaged one."""

import json
from typing import Any

from quartet.config.base import ConfigError
from quartet.config.explain import excerpt
from quartet.wire.json_object import strict_json

_DIGITS = 16
"""Most digits of a whole number; a double holds that many exactly."""


def parse_object(line: str | bytes, where: str, **options: Any) -> dict[str, Any]:
    """The JSON object in `line`, with `options` of `json.loads`. ConfigError, which begins with `where`, if the line
    holds something else."""
    try:
        values = strict_json(line, **options)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"{where}: not valid JSON: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: should be a JSON object, got {excerpt(values)}")
    return values


def whole(digits: str) -> int:
    """A whole number that a double holds, for `parse_int`; ValueError for another."""
    if len(digits) > _DIGITS:
        raise ValueError("a whole number with too many digits")
    return int(digits)
