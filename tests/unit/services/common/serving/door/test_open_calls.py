"""Shares of the calls that may be open at the port."""

import pytest

from services.common.security.identity import Caller
from services.common.security.policy import Limits
from services.common.serving.door.open_calls import OpenCalls
from services.common.wire.errors import ResourceExhausted

RUN, OTHER_RUN = Caller("run-a", "trainer"), Caller("run-b", "trainer")
JUDGE, PAGER = Caller("evaluator", "judge-client"), Caller("pager", "prober")


def test_a_caller_has_its_share_and_what_ends_makes_room() -> None:
    calls = OpenCalls(lambda: Limits(concurrent_calls=8, caller_share=0.25))
    first, _ = calls.begin(RUN), calls.begin(RUN)
    with pytest.raises(ResourceExhausted, match="run-a has 2 open calls, the most for one caller") as refused:
        calls.begin(RUN)
    assert refused.value.retry_after_s == 1
    calls.begin(OTHER_RUN)
    first(None)
    calls.begin(RUN)


def test_callers_that_are_no_trainers_leave_trainers_a_reserve() -> None:
    calls = OpenCalls(lambda: Limits(concurrent_calls=8, caller_share=0.5, training_reserve=0.25))
    ends = [calls.begin(caller) for caller in (JUDGE, JUDGE, JUDGE, PAGER, PAGER, PAGER)]
    with pytest.raises(ResourceExhausted, match="6 calls are open, the most for callers that are no trainers"):
        calls.begin(PAGER)
    calls.begin(RUN)
    ends[0](None)
    calls.begin(PAGER)
