"""Decorators of a replica's RPC methods, which turn each error into a gRPC status."""

import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from quartet.seams.serve import declare_context
from quartet.security.identity import caller_of
from quartet.serving.share import Share, share_of
from quartet.wire.errors import Internal, ServiceError

log = logging.getLogger("quartet")


class Context(Protocol):
    """The part of a gRPC servicer context that the decorators use."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def invocation_metadata(self) -> Any: ...


def translated(
    method: Callable[..., Awaitable[Any]],
) -> Callable[..., Awaitable[Any]]:
    """Makes a unary RPC method answer a ServiceError with its status, and any other error with a bare INTERNAL.

    A method with a parameter `share` gets the call's share. A lease in the request says who called.
    """
    extra = _extra(method)

    @functools.wraps(method)
    async def call(self: Any, request: Any, grpc_context: Context) -> Any:
        try:
            return await method(self, _with_identity(request, grpc_context), *extra(grpc_context))
        except Exception as error:
            raise _reported(error, method.__name__, grpc_context) from None

    declare_context(call)
    return call


def translated_stream(
    method: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncIterator[Any]]:
    """Like `translated`, for an RPC that streams its responses."""
    extra = _extra(method)

    @functools.wraps(method)
    async def call(self: Any, request: Any, grpc_context: Context) -> AsyncIterator[Any]:
        try:
            given = _with_identity(request, grpc_context)
            # When the caller goes away only this generator is closed; close the method's own at once too.
            async with contextlib.aclosing(method(self, given, *extra(grpc_context))) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            raise _reported(error, method.__name__, grpc_context) from None

    declare_context(call)
    return call


def _extra(method: Callable[..., Any]) -> Callable[[Context], tuple[Share, ...]]:
    """The arguments of a method besides its request, taken from the call."""
    if "share" in inspect.signature(method).parameters:
        return lambda context: (share_of(context),)
    return lambda context: ()


def _with_identity(request: Any, context: Context) -> Any:
    """The request with the caller's identity in its lease; set here, so that no method can forget it."""
    if isinstance(request, Message) and "lease" in request.DESCRIPTOR.fields_by_name and request.HasField("lease"):
        caller = caller_of(context)
        request.lease.identity = "" if caller.anonymous else caller.name  # type: ignore[attr-defined]
    return request


def _reported(error: Exception, method: str, context: Context) -> Exception:
    """Sets the status on the context. Only the text of a ServiceError reaches the caller: others may hold secrets."""
    if isinstance(error, ServiceError):
        code, details = error.code, str(error)
    elif isinstance(error, TimeoutError):
        code, details = grpc.StatusCode.DEADLINE_EXCEEDED, f"{method}: out of time"
    else:
        log.exception("%s failed", method)
        code, details = grpc.StatusCode.INTERNAL, f"{method}: internal error ({type(error).__name__}); see the log"
    context.set_code(code)
    context.set_details(details)
    return error if isinstance(error, ServiceError) else Internal(details)
