"""The architectures that are said to be tried, in code and docs, are those that the tests try."""

import re
from pathlib import Path

from quartet.models.architectures import TESTED_ARCHITECTURES
from tests.families import FAMILIES

PAGE = Path(__file__).parents[4] / "docs/models.md"


def test_those_that_are_tried_are_those_of_the_tests() -> None:
    assert {family.kind for family in FAMILIES.values()} == TESTED_ARCHITECTURES


def test_the_page_has_a_row_for_each() -> None:
    rows = dict(re.findall(r"^\| `([\w.-]+)` \(`(\w+)`\)", PAGE.read_text(), re.MULTILINE))
    assert rows == {name: family.kind for name, family in FAMILIES.items()}
