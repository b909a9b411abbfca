"""docs/algorithm.md and docs/rewards.md compute what they say."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "examples"), [("algorithm.md", 6), ("rewards.md", 16)])
def test_what_a_page_computes_is_what_comes_out(page: str, examples: int) -> None:
    done = doctest.testfile(str(DOCS / page), module_relative=False)
    assert (done.failed, done.attempted) == (0, examples)
