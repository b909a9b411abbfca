"""The pauses between tries, and the one that a service asks for, which travels in its error's text."""

import asyncio
import random

import pytest

from quartet.wire.backoff import Backoff, Deadline, pushback_of, with_pushback
from quartet.wire.errors import ResourceExhausted, Unavailable
from tests.unit.virtual_time import in_virtual_time

GONE = Unavailable("gone")


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


async def pauses(backoff: Backoff, tries_s: list[float], at_least_s: float | None = None) -> list[float]:
    """The pauses after tries of these lengths."""
    loop, taken = asyncio.get_running_loop(), []
    for seconds in tries_s:
        await asyncio.sleep(seconds)
        began = loop.time()
        await backoff.wait(GONE, at_least_s)
        taken.append(round(loop.time() - began, 6))
    return taken


@in_virtual_time
async def test_pauses_double_up_to_two_seconds_and_are_as_long_as_the_service_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    assert await pauses(Backoff(Deadline(60)), [0] * 7) == [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]
    assert await pauses(Backoff(Deadline(60)), [0] * 3, 0.2) == [0.25, 0.25, 0.4]
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    assert await pauses(Backoff(Deadline(60)), [0] * 2) == [0.05, 0.1]
    assert await pauses(Backoff(Deadline(60)), [0], 0.2) == [0.2]


@pytest.mark.parametrize(
    ("deadline_s", "tries_s", "begun"),
    [
        # After the first try 0.1 s of pause; then the next try has to fit that takes as long, or 0.5 s.
        (1.0, [0.35], 1),
        (0.7, [0.35], 0),
        (3.0, [2.35], 1),
        (3.0, [2.45], 0),
        # The pause before a try is no part of it.
        (1.25, [0.3, 0.3], 2),
        (1.15, [0.3, 0.3], 1),
    ],
)
@in_virtual_time
async def test_no_pause_is_begun_after_which_there_is_no_time_for_a_try(
    monkeypatch: pytest.MonkeyPatch, deadline_s: float, tries_s: list[float], begun: int
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    backoff = Backoff(Deadline(deadline_s))
    assert len(await pauses(backoff, tries_s[:begun])) == begun
    if begun < len(tries_s):
        with pytest.raises(Unavailable, match=r"^gone$"):
            await pauses(backoff, tries_s[begun:])
