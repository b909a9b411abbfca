"""Shares of the calls that may be open at the port, and of the bytes of their requests."""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from quartet.config.base import ConfigError
from quartet.security.identity import ANONYMOUS, Caller
from quartet.security.policy import Limits
from quartet.serving.door.open_calls import OpenCalls
from quartet.wire.errors import ResourceExhausted

RUN, OTHER_RUN = Caller("run-a", "trainer"), Caller("run-b", "trainer")
JUDGE, PAGER = Caller("evaluator", "judge-client"), Caller("pager", "prober")


def test_a_caller_has_its_share_and_what_ends_makes_room() -> None:
    calls = OpenCalls(lambda: Limits(concurrent_calls=8, caller_share=0.25))
    first, _ = calls.begin(RUN), calls.begin(RUN)
    with pytest.raises(ResourceExhausted, match="run-a has 2 open calls, and the most is 2") as refused:
        calls.begin(RUN)
    assert refused.value.retry_after_s == 1
    calls.begin(OTHER_RUN)
    first(None)
    calls.begin(RUN)


def test_callers_that_are_not_trainers_leave_trainers_a_reserve() -> None:
    calls = OpenCalls(lambda: Limits(concurrent_calls=8, caller_share=0.5, training_reserve=0.25))
    ends = [calls.begin(caller) for caller in (JUDGE, JUDGE, JUDGE, PAGER, PAGER, PAGER)]
    with pytest.raises(ResourceExhausted, match="without the role trainer have 6 open calls, and the most is 6"):
        calls.begin(PAGER)
    calls.begin(RUN)
    ends[0](None)
    calls.begin(PAGER)


def test_without_identities_a_session_has_no_share_of_its_own() -> None:
    calls = OpenCalls(lambda: Limits(concurrent_calls=8, caller_share=0.25))
    for _ in range(8):
        calls.begin(Caller(ANONYMOUS.name, "trainer", "session-1"))


BYTES = Limits(message_bytes={"Score": 100}, other_message_bytes=100, unanswered_bytes=1000, caller_share=0.25)


def test_the_bytes_that_a_caller_has_answered_make_room_for_more() -> None:
    calls = OpenCalls(lambda: BYTES)
    ends = [calls.hold(RUN, 100), calls.hold(RUN, 100)]
    with pytest.raises(ResourceExhausted, match="run-a has 200 bytes of unanswered requests, and the most is 250"):
        calls.hold(RUN, 100)
    calls.hold(RUN, 50)
    calls.hold(OTHER_RUN, 100)
    ends[0](None)
    calls.hold(RUN, 100)


def test_the_bytes_of_all_callers_are_bounded_too() -> None:
    calls = OpenCalls(lambda: BYTES)
    for caller in (RUN, OTHER_RUN, JUDGE):
        calls.hold(caller, 250)
    calls.hold(PAGER, 200)
    with pytest.raises(
        ResourceExhausted, match="all callers have 950 bytes of unanswered requests, and the most is 1"
    ):
        calls.hold(Caller("run-c", "trainer"), 100)


def test_callers_that_are_not_trainers_leave_trainers_bytes_too() -> None:
    calls = OpenCalls(lambda: BYTES.model_copy(update={"training_reserve": 0.6}))
    calls.hold(JUDGE, 250)
    with pytest.raises(ResourceExhausted, match=r"the role trainer have 250 bytes of unanswered .* most is 400"):
        calls.hold(PAGER, 200)
    calls.hold(RUN, 200)


def test_callers_without_identities_are_one_and_may_have_everything() -> None:
    calls = OpenCalls(lambda: BYTES)
    calls.hold(ANONYMOUS, 1000)
    with pytest.raises(ResourceExhausted, match="anonymous has 1000 bytes"):
        calls.hold(ANONYMOUS, 1)


async def _waits(turn: AbstractAsyncContextManager[None]) -> bool:
    try:
        async with asyncio.timeout(0.05), turn:
            return False
    except TimeoutError:
        return True


async def test_a_caller_has_some_large_requests_received_at_a_time_and_each_connection_a_quarter() -> None:
    calls = OpenCalls(lambda: Limits(receiving=8))
    async with AsyncExitStack() as held:
        for connection in "aabbcc":
            await held.enter_async_context(calls.receiving(RUN, connection, small=False))
        assert await _waits(calls.receiving(RUN, "a", small=False))
        assert not await _waits(calls.receiving(RUN, "d", small=False))
        for _ in range(2):
            await held.enter_async_context(calls.receiving(RUN, "d", small=False))
        assert await _waits(calls.receiving(RUN, "e", small=False))
        assert not await _waits(calls.receiving(OTHER_RUN, "a", small=False))
        assert not await _waits(calls.receiving(RUN, "a", small=True))
    assert not await _waits(calls.receiving(RUN, "a", small=False))
    assert calls._turns == {}


async def test_small_requests_of_a_trainer_count_by_connection_and_those_of_others_in_all() -> None:
    calls = OpenCalls(lambda: Limits(receiving=4))
    async with AsyncExitStack() as held:
        for caller in (RUN, PAGER):
            for _ in range(4):
                await held.enter_async_context(calls.receiving(caller, "a", small=True))
        assert await _waits(calls.receiving(RUN, "a", small=True))
        assert not await _waits(calls.receiving(RUN, "b", small=True))
        assert await _waits(calls.receiving(PAGER, "b", small=True))
    assert calls._turns == {}


def test_a_request_that_may_be_sent_fits_an_idle_port() -> None:
    with pytest.raises(ConfigError, match=r"message_bytes: 300; should be at most 250, the part of unanswered_bytes"):
        Limits.parse({"message_bytes": {"Score": 300}, "other_message_bytes": 9, "unanswered_bytes": 500}, "limits")
