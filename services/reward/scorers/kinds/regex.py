"""1 for an answer that a regular expression matches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from quartet.wire.pairs import Pair
from services.reward.scorers.kinds.answers import Given, UnusableError, by_pairs, regex_seconds, text


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], list[Given]]:
    """The scorer's function."""
    own = regex.compile(options["pattern"]) if options["pattern"] else None

    def compiled(value: Any) -> Any:
        try:
            return regex.compile(text(value))
        except (regex.error, ValueError, RecursionError):
            raise UnusableError("is no regular expression") from None

    def score(answer: str, wanted: Any) -> float:
        pattern = wanted if own is None else own
        matches = pattern.fullmatch if options["whole"] else pattern.search
        return float(matches(answer, timeout=regex_seconds(options)) is not None)

    return by_pairs(score, options, expected=compiled if own is None else None)
