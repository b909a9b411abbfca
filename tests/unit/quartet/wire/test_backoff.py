"""The time until a retry travels from a replica's error to its client's."""

import pytest

from quartet.wire.backoff import pushback_of, with_pushback
from quartet.wire.errors import ResourceExhausted


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "busy (retry after 250 ms)"), (0.0001, "busy (retry after 1 ms)")]
)
def test_pushback_in_the_text_and_out_again(seconds: float, text: str) -> None:
    assert with_pushback("busy", seconds) == text
    assert pushback_of(text) == ("busy", max(seconds, 0.001))


@pytest.mark.parametrize(
    "text", ["busy", "", "(retry after 3 s)", " (retry after 5 ms) or not", " (retry after -1 ms)"]
)
def test_text_without_pushback_stays(text: str) -> None:
    assert with_pushback(text, None) == text
    assert pushback_of(text) == (text, None)


def test_the_error_carries_it() -> None:
    error = ResourceExhausted("busy", 1.5)
    assert (str(error), error.retry_after_s) == ("busy (retry after 1500 ms)", 1.5)
    assert ResourceExhausted("too large").retry_after_s is None
