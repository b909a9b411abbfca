"""Runs of items, against other ways to divide them."""

import itertools

import numpy as np
import pytest

from quartet.models.runs import even_runs, runs


def test_a_run_ends_before_the_item_that_is_too_much_for_it() -> None:
    assert runs([10, 10, 9, 10, 30, 1], int, 20) == [[10, 10], [9, 10], [30], [1]]
    assert runs([], int, 20) == []


@pytest.mark.parametrize(
    ("sizes", "most", "lengths"),
    [
        ([384] * 64, 8192, [16, 16, 16, 16]),  # not 21, 21, 21 and 1
        ([1, 2, 3, 4, 5, 6], 11, [4, 2]),  # 10 and 11: no two runs of less
        ([5, 5, 5], 15, [3]),
        ([3, 3, 3, 20], 10, [3, 1]),  # more than most
        ([20], 10, [1]),
        ([], 10, []),
    ],
)
def test_runs_are_as_few_and_as_even_as_they_can_be(sizes: list[int], most: int, lengths: list[int]) -> None:
    divided = even_runs(sizes, int, most)
    assert [len(run) for run in divided] == lengths
    assert list(itertools.chain.from_iterable(divided)) == sizes


@pytest.mark.parametrize("seed", range(20))
def test_no_other_runs_are_fewer_or_more_even(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes, most = draw.integers(1, 12, 9).tolist(), 14
    ways = []
    for cuts in itertools.product([False, True], repeat=len(sizes) - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), len(sizes)]
        sums = [sum(sizes[begin:end]) for begin, end in itertools.pairwise(bounds)]
        if max(sums) <= most:
            ways.append((len(sums), max(sums)))
    divided = even_runs(sizes, int, most)
    assert (len(divided), max(map(sum, divided))) == min(ways)
