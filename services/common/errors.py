"""The errors that cross the wire, and the one place where they become gRPC status codes and come back."""

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc

log = logging.getLogger("quartet")


class ServiceError(Exception):
    """An error with a gRPC status. The message is for the caller: it names the field and what would be right."""

    code = grpc.StatusCode.INTERNAL


class InvalidArgument(ServiceError):
    """The request can never succeed as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class FailedPrecondition(ServiceError):
    """The request may succeed once something else has happened, or on another replica."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(ServiceError):
    """Nobody could answer; safe to repeat."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    """No answer in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ResourceExhausted(ServiceError):
    """The service has more to do than it admits."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotFound(ServiceError):
    """There is no such application."""

    code = grpc.StatusCode.NOT_FOUND


class Internal(ServiceError):
    """A fault of the service."""


_BY_CODE: dict[grpc.StatusCode, type[ServiceError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        FailedPrecondition,
        Unavailable,
        DeadlineExceeded,
        ResourceExhausted,
        NotFound,
        Internal,
    )
}


class Context(Protocol):
    """What of a gRPC servicer context the translation needs."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group, in its groups, and so on; or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def translated(
    method: Callable[..., Awaitable[Any]],
) -> Callable[..., Awaitable[Any]]:
    """Makes a unary RPC method answer a ServiceError with its status, and anything else with a bare INTERNAL."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, grpc_context: Context) -> Any:
        try:
            return await method(self, request)
        except Exception as error:
            raise _reported(error, method.__name__, grpc_context) from None

    _declare_context(call)
    return call


def translated_stream(
    method: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncIterator[Any]]:
    """Like `translated`, for an RPC that streams its responses."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, grpc_context: Context) -> AsyncIterator[Any]:
        try:
            # A caller that goes away closes this generator only; the method's own must end with it, not some day.
            async with contextlib.aclosing(method(self, request)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            raise _reported(error, method.__name__, grpc_context) from None

    _declare_context(call)
    return call


def _declare_context(call: Any) -> None:
    """Serve passes the context to methods whose signature asks for it, so the wrapped one must not hide ours."""
    del call.__wrapped__


def _reported(error: Exception, method: str, context: Context) -> Exception:
    """Sets the status on the context. Only a ServiceError's own text reaches the caller: others may hold secrets."""
    if isinstance(error, ServiceError):
        code, details = error.code, str(error)
    elif isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        code, details = grpc.StatusCode.DEADLINE_EXCEEDED, f"{method}: out of time"
    else:
        log.exception("%s failed", method)
        code, details = grpc.StatusCode.INTERNAL, f"{method}: internal error ({type(error).__name__}); see the log"
    context.set_code(code)
    context.set_details(details)
    return error if isinstance(error, ServiceError) else Internal(details)


# Serve's proxy reports a replica that died under a call as INTERNAL, in the words of Ray's ActorDiedError and
# ActorUnavailableError; to the caller it is one more failure that another replica can make good.
_REPLICA_LOST = re.compile(r"The actor (died unexpectedly|[0-9a-f]+ is unavailable)")


def from_rpc(error: grpc.RpcError, call: str) -> ServiceError:
    """The ServiceError that a gRPC error stands for, with the name of the call in front."""
    code = error.code()  # type: ignore[attr-defined]
    details = error.details()  # type: ignore[attr-defined]
    if code is grpc.StatusCode.INTERNAL and _REPLICA_LOST.match(details or ""):
        return Unavailable(f"{call}: the replica died while it answered")
    kind = _BY_CODE.get(code, Internal)
    prefix = "" if kind is not Internal or code is grpc.StatusCode.INTERNAL else f"{code.name}: "
    return kind(f"{call}: {prefix}{details}")
