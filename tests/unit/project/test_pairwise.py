"""The choice of test cases that show all pairs of settings."""

from itertools import product

from tests.pairwise import cover


def test_two_settings_need_every_case() -> None:
    cases = [{"a": a, "b": b} for a, b in product((0, 1), repeat=2)]
    assert cover(cases) == {0, 1, 2, 3}


def test_three_settings_of_two_values_need_four_of_eight() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in product((0, 1), repeat=3)]
    taken = cover(cases)
    assert len(taken) == 4
    for first, second in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(cases[index][first], cases[index][second]) for index in taken} == set(product((0, 1), repeat=2))


def test_a_pair_that_one_case_alone_shows_is_kept() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 0, "b": 0}, {"a": 1, "b": 1}]
    assert cover(cases) == {0, 2}
