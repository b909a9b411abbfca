"""Lines of JSON files that this program wrote, and that something may have happened to since."""

import json
from typing import Any

from services.common.config import ConfigError

_DIGITS = 16
"""Of the longest whole number that is taken: a double still holds it."""


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `line`. ConfigError, beginning with `where`, if it holds none, or is no text at all."""
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
        raise ValueError("longer than any number of ours")
    return int(digits)
