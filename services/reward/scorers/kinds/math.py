"""1 for an answer that equals the expected one as mathematics, by math-verify.

Its own limits of time are off, as they use signals; the process is killed instead.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from math_verify import parse, verify

from quartet.wire.pairs import Pair
from services.reward.scorers.kinds.answers import Given, UnusableError, by_pairs, text

logging.getLogger("math_verify").setLevel(logging.ERROR)  # which warns that there is no limit of time


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], list[Given]]:
    """The scorer's function."""

    def read(value: Any) -> list[Any]:
        given = text(value)
        # Outside of `$` only numbers are found.
        bare = not any(mark in given for mark in ("$", "\\boxed", "\\(", "\\["))
        if found := _parsed(f"${given}$" if bare else given):
            return found
        raise UnusableError("holds nothing that can be read as mathematics")

    def score(answer: str, wanted: list[Any]) -> float:
        return float(
            verify(
                wanted,
                _parsed(answer),
                float_rounding=options["digits"],
                strict=options["strict"],
                timeout_seconds=None,
            )
        )

    return by_pairs(score, options, expected=read)


def _parsed(value: str) -> list[Any]:
    found: list[Any] = parse(value, parsing_timeout=None)
    return found
