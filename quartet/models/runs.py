"""Division of items that lie in a row into runs, parts that follow each other."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

One = TypeVar("One")


def runs(items: Iterable[One], size: Callable[[One], int], most: int) -> list[list[One]]:
    """Runs that are filled one after the other, each as far as `most` allows for the sum of its sizes. A larger item
    is a run of its own."""
    made: list[list[One]] = []
    filled = 0
    for item in items:
        if not made or filled + size(item) > most:
            made.append([])
            filled = 0
        made[-1].append(item)
        filled += size(item)
    return made


def even_runs(items: Sequence[One], size: Callable[[One], int], most: int) -> list[list[One]]:
    """The fewest runs of at most `most` each, with the largest run as small as it can be."""
    best = runs(items, size, most)
    least = min(most, -(-sum(map(size, items)) // max(1, len(best))))
    while least < most:
        middle = (least + most) // 2
        if len(fewer := runs(items, size, middle)) == len(best):
            best, most = fewer, middle
        else:
            least = middle + 1
    return best
