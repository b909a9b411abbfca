"""Limits on the work that waits in a service, counted before it is decoded."""

from contextlib import ExitStack

import pytest

from quartet.config.base import ConfigError
from quartet.config.limits import LimitsConfig
from quartet.serving.admission import Admission
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.errors import ResourceExhausted
from services.critic.replica import Critic
from services.reference.replica import Reference
from services.reward.replica import Reward
from services.rollout.replica import Rollout
from tests.unit.fake_clock import Clock

LIMITS = LimitsConfig(max_call_rows=4, max_call_tokens=400, max_waiting_rows=16, max_waiting_tokens=1600)
RUN, OTHER = Share("run", Purpose.TRAINING), Share("other", Purpose.FOREIGN)


def test_a_call_that_is_too_large_is_told_to_be_split_and_not_to_come_back() -> None:
    admission = Admission(LIMITS)
    for rows, tokens, message in (
        (5, 5, "tokens: 5 rows, but a call may hold 4; send it in several"),
        (4, 401, "tokens: 401 tokens, but a call may hold 400; send it in several"),
    ):
        with (
            pytest.raises(ResourceExhausted, match=message) as caught,
            admission.admitted(RUN, rows, tokens, "tokens"),
        ):
            pass
        assert caught.value.retry_after_s is None
    with admission.admitted(RUN, 4, 400, "tokens"):
        assert admission.waiting_rows == 4
    assert admission.waiting_rows == 0


@pytest.mark.parametrize(("rows", "tokens"), [(4, 4), (1, 400)])
def test_a_caller_may_have_its_share_and_foreign_ones_together_leave_training_its_own(rows: int, tokens: int) -> None:
    admission = Admission(LIMITS)
    with ExitStack() as held:
        for _ in range(2):  # half of it
            held.enter_context(admission.admitted(OTHER, rows, tokens, "pairs"))
        with pytest.raises(ResourceExhausted, match="of this caller wait already and"):
            held.enter_context(admission.admitted(OTHER, rows, tokens, "pairs"))
        third = Share("third", Purpose.EVALUATION)
        held.enter_context(admission.admitted(third, rows, tokens, "pairs"))
        with pytest.raises(ResourceExhausted, match="beside training wait already and") as caught:
            held.enter_context(admission.admitted(third, rows, tokens, "pairs"))
        assert caught.value.retry_after_s is not None
        held.enter_context(admission.admitted(RUN, rows, tokens, "pairs"))
        with pytest.raises(ResourceExhausted, match="in all wait already and"):
            held.enter_context(admission.admitted(RUN, rows, tokens, "pairs"))
    # What is answered, or was given up, counts no more.
    with admission.admitted(OTHER, rows, tokens, "pairs"):
        assert admission.waiting_rows == rows


def test_calls_are_counted_however_small_they_are() -> None:
    admission = Admission(LimitsConfig(max_waiting_calls=8))
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(admission.admitted(OTHER, 1, 1, "pairs"))
        with pytest.raises(
            ResourceExhausted, match="pairs: 1 calls are refused, as 4 of this caller wait already and 4 may"
        ):
            held.enter_context(admission.admitted(OTHER, 1, 1, "pairs"))
        held.enter_context(admission.admitted(RUN, 1, 1, "pairs"))


def test_it_is_the_service_that_refuses_and_not_serve() -> None:
    most = LimitsConfig(max_waiting_calls=2048).max_waiting_calls
    for deployment in (Rollout, Reward, Reference, Critic):
        assert deployment._deployment_config.max_ongoing_requests >= 2 * most  # type: ignore[union-attr]


def test_when_to_come_back_follows_how_long_calls_take() -> None:
    clock = Clock()
    admission = Admission(LIMITS, clock)

    def pause() -> float:
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(admission.admitted(OTHER, 4, 4, "pairs"))
            with pytest.raises(ResourceExhausted) as caught:
                held.enter_context(admission.admitted(OTHER, 4, 4, "pairs"))
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    assert pause() == pytest.approx(1.0)
    for seconds, expected in ((30, 10), (0, 0.1)):
        for _ in range(60):
            with admission.admitted(RUN, 1, 1, "pairs"):
                clock.now += seconds
        assert pause() == pytest.approx(expected, rel=0.01)


def test_limits_that_no_call_could_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_call_rows: 4096; should be at most 2048"):
        LimitsConfig.parse({"max_waiting_rows": 4096}, "reward.args.limits")
    with pytest.raises(ConfigError, match=r"max_call_tokens: 4194304; should be at most 4000000"):
        LimitsConfig.parse({"max_waiting_tokens": 8_000_000}, "reward.args.limits")
