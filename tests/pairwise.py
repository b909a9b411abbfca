"""A few of many test cases that together show every pair of settings which any of them shows."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Settings = Mapping[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def cover(cases: Sequence[Settings]) -> set[int]:
    """Indices of some of `cases` that show every pair of settings which occurs in any case.

    Takes the case that shows most of the pairs still missing, again and again. For example of four cases with two
    settings of two values each it takes all four, of eight with three settings four.
    """
    shown = [_pairs(case) for case in cases]
    missing = set().union(*shown)
    taken: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(shown[index] & missing))
        taken.add(best)
        missing -= shown[best]
    return taken


def covered(cases: Sequence[tuple[Any, ...]], settings: Iterable[Settings]) -> list[Any]:
    """Parameters of a test: those of `cases` that `cover` does not take, by their settings, are marked exhaustive."""
    always = cover(list(settings))
    return [
        pytest.param(*case, marks=() if index in always else pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]


def _pairs(case: Settings) -> set[Pair]:
    return set(combinations(sorted(case.items(), key=lambda setting: setting[0]), 2))
