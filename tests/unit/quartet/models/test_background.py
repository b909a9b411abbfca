"""Passes that leave the cores to sampling first."""

import threading

import pytest

from quartet.models import background
from quartet.models.background import in_background
from tests.unit.priorities import own_priority


@in_background
def half(number: int, *, fails: str = "") -> tuple[int, int, str]:
    if fails:
        raise ValueError(fails)
    return number // 2, own_priority(), threading.current_thread().name


def test_it_answers_and_raises_as_the_function_does_and_the_caller_keeps_its_priority() -> None:
    mine = own_priority()
    assert half(6) == (3, 19, "background_0")
    with pytest.raises(ValueError, match=r"^odd$"):
        half(5, fails="odd")
    assert half(4)[0] == 2  # the thread goes on after an error
    assert own_priority() == mine


def test_beside_a_gpu_it_runs_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "share_cores", lambda: False)
    assert half(6) == (3, own_priority(), threading.current_thread().name)
