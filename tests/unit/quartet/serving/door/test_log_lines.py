"""Lines in the logs about calls that were refused or failed."""

import logging
import sys

import grpc
import pytest
from ray.exceptions import RayTaskError
from ray.serve.exceptions import gRPCStatusError

from quartet.serving.door.log_lines import EVERY_S, LINES, FailedCalls, Refusals, shorten_failed_calls
from quartet.wire.errors import InvalidArgument


def failed(error: BaseException) -> logging.LogRecord:
    """The log record that `logger.exception` makes of it."""
    try:
        raise error
    except type(error):
        return logging.LogRecord("ray.serve", logging.ERROR, "replica.py", 1, "Request failed.", (), sys.exc_info())


def status(text: str = "pairs: empty;\nsend at least one") -> gRPCStatusError:
    return gRPCStatusError(InvalidArgument(text), grpc.StatusCode.INVALID_ARGUMENT, text)


def test_an_error_that_was_answered_is_one_line() -> None:
    record = failed(status())
    assert FailedCalls().filter(record)
    assert logging.Formatter().format(record) == "Request failed. pairs: empty; send at least one"


def test_so_is_one_that_ray_passed_on_to_the_proxy() -> None:
    passed_on = RayTaskError("handle_request", "Traceback\n" * 50, status("too many")).as_instanceof_cause()
    record = failed(passed_on)
    assert FailedCalls().filter(record)
    assert logging.Formatter().format(record) == "Request failed. too many"


def test_so_is_one_of_a_replica_that_another_one_asks() -> None:
    for error in (
        InvalidArgument("pairs: empty"),
        RayTaskError("scored", "Traceback\n" * 50, InvalidArgument("pairs: empty")).as_instanceof_cause(),
    ):
        record = failed(error)
        assert FailedCalls().filter(record)
        assert logging.Formatter().format(record) == "Request failed. pairs: empty"


def test_a_long_reason_is_cut() -> None:
    record = failed(status("x" * 5000))
    assert FailedCalls().filter(record)
    assert len(record.getMessage()) == 316


def test_any_other_error_keeps_its_trace() -> None:
    record = failed(RuntimeError("ours"))
    assert FailedCalls().filter(record)
    assert "Traceback" in logging.Formatter().format(record)


def test_many_are_few_lines_and_the_next_says_how_many_were_dropped() -> None:
    now = [100.0]
    filter_ = FailedCalls(lambda: now[0])
    assert sum(filter_.filter(failed(status())) for _ in range(1000)) == LINES
    now[0] += EVERY_S
    record = failed(status("again"))
    assert filter_.filter(record)
    assert record.getMessage() == f"Request failed. again ({1000 - LINES} more before this line)"


def test_it_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "filters", [])
    shorten_failed_calls()
    shorten_failed_calls()
    assert [type(present) for present in logger.filters] == [FailedCalls]


def test_the_first_refusal_is_logged_at_once_and_the_next_thousand_are_one_line(logged: list[str]) -> None:
    now = [100.0]
    refusals = Refusals(lambda: now[0])
    for number in range(1001):
        refusals.note("/quartet.v1.Critic/Save", f"ipv4:10.0.0.9:{number}", "no proof")
    assert logged == ["refused /quartet.v1.Critic/Save from ipv4:10.0.0.9:0: no proof"]
    now[0] += EVERY_S
    refusals.note("/quartet.v1.Critic/Save", "ipv4:10.0.0.9:1", "no proof")
    assert logged[-1].endswith("no proof (1000 more since the last such line)")
    assert len(logged) == 2
