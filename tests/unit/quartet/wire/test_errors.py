"""Errors become gRPC status codes in one place and come back as what they were."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest

from protos import reference_pb2
from quartet.serving.door.checked import parsed
from quartet.serving.servicer import translated, translated_stream
from quartet.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LeaseLost,
    NotFound,
    OffTimeline,
    ResourceExhausted,
    ServiceError,
    TooLarge,
    Unavailable,
    from_rpc,
)
from tests.unit.contexts import Context

KINDS = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Internal: grpc.StatusCode.INTERNAL,
}


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


def test_a_full_port_asks_to_come_back_and_not_to_split() -> None:
    error = from_rpc(
        FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"), "reward.Score"
    )
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == 1


class Servicer:
    """Answers with what it is asked for: an error raised, anything else returned."""

    def __init__(self) -> None:
        self.closed = False

    @translated
    async def Ask(self, request: Any) -> Any:
        if isinstance(request, BaseException):
            raise request
        return request

    @translated_stream
    async def Stream(self, request: Any) -> AsyncGenerator[Any, None]:
        try:
            for part in request:
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            self.closed = True


async def consume(stream: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in stream]


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_crosses_the_wire(kind: type[ServiceError]) -> None:
    context = Context()
    with pytest.raises(kind):
        await Servicer().Ask(kind("prompts: empty"), context)
    assert (context.code, context.details) == (KINDS[kind], "prompts: empty")
    back = from_rpc(FakeRpcError(KINDS[kind], context.details), "reward.Score")
    assert type(back) is kind
    assert str(back) == "reward.Score: prompts: empty"


def test_a_request_of_too_many_elements_is_too_large() -> None:
    """The client does not repeat such a call."""
    request = reference_pb2.LogprobsRequest(end_ids=range(50))
    with pytest.raises(ResourceExhausted) as caught:
        parsed(type(request), request.SerializeToString(), "reference.Logprobs", 20)
    error = FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(caught.value))
    assert type(from_rpc(error, "reference.Logprobs")) is TooLarge


async def test_a_success_sets_no_status() -> None:
    context = Context()
    assert await Servicer().Ask(3, context) == 3
    assert await consume(Servicer().Stream([1, 2], context)) == [1, 2]
    assert (context.code, context.details) == (None, None)


@pytest.mark.parametrize("streams", [False, True])
async def test_the_text_of_an_unforeseen_error_stays_in_the_log(streams: bool, logged: list[str]) -> None:
    context, error = Context(), RuntimeError("password: 1234")
    asked = consume(Servicer().Stream([error], context)) if streams else Servicer().Ask(error, context)
    with pytest.raises(Internal) as caught:
        await asked
    expected = f"{'Stream' if streams else 'Ask'}: internal error (RuntimeError); see the log"
    assert (context.code, context.details, str(caught.value)) == (grpc.StatusCode.INTERNAL, expected, expected)
    # Neither does it travel as a cause, which Serve would print into the status.
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None
    assert "password: 1234" in "".join(logged)


async def test_time_that_runs_out_inside_is_a_deadline() -> None:
    context = Context()
    with pytest.raises(Internal, match="Ask: out of time"):
        await Servicer().Ask(TimeoutError(), context)
    assert (context.code, context.details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "Ask: out of time")


async def test_cancelling_is_not_an_error() -> None:
    context = Context()
    with pytest.raises(asyncio.CancelledError):
        await Servicer().Ask(asyncio.CancelledError(), context)
    assert context.code is None


async def test_a_stream_fails_after_what_it_gave() -> None:
    context = Context()
    stream = Servicer().Stream([1, Unavailable("gone")], context)
    assert await anext(stream) == 1
    with pytest.raises(Unavailable):
        await anext(stream)
    assert (context.code, context.details) == (grpc.StatusCode.UNAVAILABLE, "gone")


async def test_a_stream_that_is_left_ends_at_once() -> None:
    servicer = Servicer()
    stream: Any = servicer.Stream([1, 2], Context())
    assert await anext(stream) == 1
    await stream.aclose()
    assert servicer.closed


def test_serve_sees_that_the_methods_take_a_context() -> None:
    for method in (Servicer.Ask, Servicer.Stream):
        assert list(inspect.signature(method).parameters) == ["self", "request", "grpc_context"]


def test_a_status_without_a_kind_is_named() -> None:
    error = from_rpc(FakeRpcError(grpc.StatusCode.ABORTED, "by peer"), "critic.Train")
    assert type(error) is Internal
    assert str(error) == "critic.Train: ABORTED: by peer"


def test_a_call_that_its_server_cancelled_may_be_repeated() -> None:
    """A call that its caller cancels raises asyncio's CancelledError instead."""
    error = from_rpc(FakeRpcError(grpc.StatusCode.CANCELLED, "Client for request 7 disconnected."), "critic.Train")
    assert type(error) is Unavailable
    assert str(error) == "critic.Train: the proxy or the replica was ending and cancelled the call"


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("timeline: a holds version 7 of an abandoned timeline (3)", OffTimeline),
        ("lease: run a no longer holds this service", LeaseLost),
        ("min_version: 8 asked, but a serves 7", FailedPrecondition),
    ],
)
def test_an_abandoned_past_a_lost_lease_and_mere_age_are_told_apart(details: str, kind: type[Exception]) -> None:
    error = from_rpc(FakeRpcError(grpc.StatusCode.FAILED_PRECONDITION, details), "rollout.Generate")
    assert (type(error), str(error)) == (kind, f"rollout.Generate: {details}")


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        ("INTERNAL", "The actor died unexpectedly before finishing this task.", Unavailable),
        ("INTERNAL", "The actor is dead because its node has died.", Unavailable),
        ("INTERNAL", "The actor 0a1b2c is unavailable: it may be restarting", Unavailable),
        ("INTERNAL", "ActorUnavailableError", Unavailable),
        # Words of a caller or of a scorer are not Ray's.
        ("INTERNAL", "the scorer said: The actor died", Internal),
        ("INVALID_ARGUMENT", "The actor died", InvalidArgument),
        ("INVALID_ARGUMENT", "lease: should be a number", InvalidArgument),
        ("INTERNAL", None, Internal),
        ("FAILED_PRECONDITION", None, FailedPrecondition),
        ("RESOURCE_EXHAUSTED", None, ResourceExhausted),
    ],
)
def test_a_call_is_repeated_where_ray_says_that_the_replica_is_lost(
    code: str, details: str | None, kind: type[Exception]
) -> None:
    assert type(from_rpc(FakeRpcError(grpc.StatusCode[code], details), "reward.Score")) is kind
