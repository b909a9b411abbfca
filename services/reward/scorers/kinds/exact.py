"""1 for an answer that is the expected text."""

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from quartet.wire.pairs import Pair
from services.reward.scorers.kinds.answers import Given, by_pairs, text

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _number(value: str) -> str:
    """A text that is a number as all numbers equal to it."""
    bare = re.sub(r"(?<=\d),(?=\d{3})", "", value.strip().strip("$%").strip())
    try:
        sign, digits, exponent = Decimal(bare).as_tuple()
        if not isinstance(exponent, int):  # of an infinity or NaN
            return value
        # Decimal's own arithmetic, such as normalize(), rounds to 28 digits.
        kept = len("".join(map(str, digits)).rstrip("0"))
        return str(Decimal((sign, digits[:kept], exponent + len(digits) - kept))) if kept else "0"
    except InvalidOperation:
        return value


_STEPS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "case": str.casefold,
    "spaces": lambda value: " ".join(value.split()),
    "punctuation": lambda value: value.translate(_PUNCTUATION),
    "articles": lambda value: re.sub(r"\b(?:a|an|the)\b ?", "", value, flags=re.IGNORECASE),
    "unicode": lambda value: unicodedata.normalize("NFKC", value),
    "numbers": _number,
}


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], list[Given]]:
    """The scorer's function."""

    def normal(value: Any) -> str:
        made = text(value)
        for name in options["normalise"]:
            made = _STEPS[name](made)
        return made

    return by_pairs(lambda answer, wanted: float(normal(answer) == wanted), options, expected=normal)
