"""docs/algorithm.md computes what it says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/algorithm.md"


def test_the_table_of_advantages_is_what_the_kinds_compute() -> None:
    done = doctest.testfile(str(PAGE), module_relative=False)
    assert (done.failed, done.attempted) == (0, 6)
