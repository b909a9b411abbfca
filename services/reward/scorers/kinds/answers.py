"""The answer in a response, and the one that is expected."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair

Given = float | Unscored


class UnusableError(ValueError):
    """The expected answer of a pair cannot be used; the text says why, without its contents."""


def by_pairs(
    score: Callable[[str, Any], float], options: Mapping[str, Any], *, expected: Callable[[Any], Any] | None
) -> Callable[[Sequence[Pair]], list[Given]]:
    """The function of pairs that scores each answer with what is expected.

    Args:
        score: the score of an answer, given with what `expected` made.
        options: of these `expected`, `extract` and `pair_timeout_s` are read here.
        expected: makes of a label or a column's value what the answer is compared with, or raises UnusableError.
            None: nothing is expected, as the options hold it.
    """
    column, limit = options["expected"], regex_seconds(options)
    extract = extracting(options["extract"], limit)

    def one(pair: Pair) -> Given:
        try:
            wanted = None if expected is None else expected(_wanted(pair, column))
            answer = extract(pair.last)
            return 0.0 if answer is None else score(answer, wanted)
        except UnusableError as problem:
            where = f"column {column!r}" if column else "the label"
            return Unscored(Outcome.NOT_APPLICABLE, f"{where} {problem}")
        except TimeoutError:
            return Unscored(Outcome.TIMEOUT, f"a regular expression took longer than {limit:g} s")

    return lambda pairs: [one(pair) for pair in pairs]


def regex_seconds(options: Mapping[str, Any]) -> float:
    """The longest processor time of a match, which ends before the process is killed."""
    return 0.5 * float(options["pair_timeout_s"])


def text(value: Any) -> str:
    """A label or a column's value as text; JSON if it is a list or an object."""
    return value if isinstance(value, str) else json.dumps(value)


def _wanted(pair: Pair, column: str) -> Any:
    if not column:
        if not pair.label:
            raise UnusableError("is empty")
        return pair.label
    if pair.columns.get(column) is None:
        raise UnusableError("is missing")
    return pair.columns[column]


def extracting(pattern: str, timeout_s: float) -> Callable[[str], str | None]:
    """The function that finds the answer in a response; None if there is none. TimeoutError if it takes longer."""
    if not pattern:
        return lambda response: response
    compiled = regex.compile(pattern)

    def found(response: str) -> str | None:
        last = next(iter(deque(compiled.finditer(response, timeout=timeout_s), 1)), None)
        return None if last is None else last[min(1, compiled.groups)]

    return found
