"""Ids of runs, and the names in them."""

import pytest

from quartet.wire.run_id import new_run_id, run_name


@pytest.mark.parametrize("name", ["demo", "demo-2", "a-0123abcd", "ü", "-"])
def test_a_name_comes_back_from_its_id_and_no_two_are_alike(name: str) -> None:
    ids = {new_run_id(name) for _ in range(100)}
    assert len(ids) == 100
    assert {run_name(each) for each in ids} == {name}


@pytest.mark.parametrize("other", ["", "mine", "mine-0123", "mine-0123abcg", "-0123abcd"])
def test_other_ids_are_names_themselves(other: str) -> None:
    assert run_name(other) == other
