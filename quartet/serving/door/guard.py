"""The interceptor of Serve's gRPC server, which checks every call before Serve sees it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quartet.security.authentication import AUTHORIZATION
from quartet.security.gate import Gate
from quartet.security.identity import caller_of, without_identity
from quartet.serving.door.call import CallContext, Metadata
from quartet.serving.door.checked import Checked, parsed
from quartet.serving.door.faults import presentable
from quartet.serving.door.log_lines import Refusals
from quartet.serving.door.open_calls import OpenCalls
from quartet.serving.door.routes import PACKAGE, Routes
from quartet.wire.errors import InvalidArgument, PermissionDenied, ServiceError, Unauthenticated

log = logging.getLogger("quartet")
APPLICATION = "application"
_REMOVED_KEYS = frozenset({AUTHORIZATION, "multiplexed_model_id", "session_id", "request_id"})
"""Metadata that is not passed on to Serve: secrets, and keys that would steer Serve's routing or enter its logs."""


class Guard(grpc.aio.ServerInterceptor):
    """Authenticates, authorizes, limits, routes and decodes calls; a failure is answered with a named error.

    Identity and role are checked before the request is received, so that bytes from strangers are never read.
    """

    def __init__(self, gate: Gate, routes: Routes, prove: Callable[[str], None], calls: OpenCalls) -> None:
        """
        Args:
            gate: says who may call what.
            routes: the applications.
            prove: takes the peer's address of each call that is admitted.
            calls: those that are open at the ports of this process.
        """
        self._gate = gate
        self._routes = routes
        self._prove = prove
        self._open = calls
        self._refusals = Refusals()
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The guarded handler; None for a method that does not exist."""
        method: str = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        if handler.request_streaming:
            return self._passed(method, handler)
        # Registered as methods that take a stream, of which one message is read: gRPC calls a handler of a single
        # request only after that request has been received. Callers notice no difference.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(method, handler), None, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(self._unary(method, handler), None, handler.response_serializer)

    def _unary(self, method: str, handler: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        async def unary(_requests: Any, context: Any) -> Any:
            call, request = await self._received(method, handler, context)
            try:
                reply = await handler.unary_unary(request, call)
            except Exception as error:
                await _refuse(context, error, method)
            presentable(call)
            return reply

        return unary

    def _streaming(self, method: str, handler: Any) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def streaming(_requests: Any, context: Any) -> AsyncIterator[Any]:
            call, request = await self._received(method, handler, context)
            try:
                async for reply in handler.unary_stream(request, call):
                    yield reply
            except Exception as error:
                await _refuse(context, error, method)
            presentable(call)

        return streaming

    def _passed(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        """Guards a method that takes a stream of requests: reflection has such methods, Quartet has none."""
        inner = handler.stream_stream or handler.stream_unary
        if not handler.response_streaming:

            async def unary(requests: Any, context: Any) -> Any:
                await self._admitted(method, context)
                return await inner(self._each(method, handler, requests, context), context)

            return handler._replace(stream_unary=unary, request_deserializer=None)

        async def streaming(requests: Any, context: Any) -> AsyncIterator[Any]:
            await self._admitted(method, context)
            async for reply in inner(self._each(method, handler, requests, context), context):
                yield reply

        return handler._replace(stream_stream=streaming, request_deserializer=None)

    async def _each(self, method: str, handler: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        """The requests of a stream, each decoded; ends the call at one that is too large or cannot be read."""
        try:
            async for raw in requests:
                self._gate.check_size(method, len(raw))
                yield self._decoded(method, handler.request_deserializer, raw)
        except ServiceError as error:
            await context.abort(error.code, str(error))

    async def _admitted(self, method: str, context: Any) -> CallContext:
        metadata = tuple(context.invocation_metadata() or ())
        application = _last(metadata, APPLICATION)
        try:
            caller = self._gate.admit(method, application, context.auth_context(), metadata)
            self._prove(context.peer())
            self._routes.check(method, application)
            context.add_done_callback(self._open.begin(caller))
        except ServiceError as error:
            if isinstance(error, Unauthenticated | PermissionDenied):
                self._refusals.note(method, context.peer(), str(error))
            await context.abort(error.code, str(error))
        passed_on = (pair for pair in without_identity(metadata) if pair[0] not in _REMOVED_KEYS)
        return CallContext(context, (*passed_on, *caller.metadata))

    async def _received(self, method: str, handler: Any, context: Any) -> tuple[CallContext, Any]:
        """The call and its decoded request; ends the call if it is not allowed or cannot be read."""
        call = await self._admitted(method, context)
        caller = caller_of(call)
        try:
            small = self._gate.limits.is_small(method)
            async with self._open.receiving(caller, call.peer(), small=small):
                raw = await self._read(method, context)
            self._gate.check_size(method, len(raw))
            context.add_done_callback(self._open.hold(caller, len(raw)))
            return call, self._decoded(method, handler.request_deserializer, raw)
        except ServiceError as error:
            await context.abort(error.code, str(error))
            raise

    def _decoded(self, method: str, deserializer: Any, raw: bytes) -> Any:
        """The request as its handler takes it: a replica's as Checked, since only the replica looks inside."""
        kind = deserializer.__self__  # the message's class, whose FromString it is
        try:
            message = parsed(kind, raw, method[1:], self._gate.limits.elements)
        except (DecodeError, ValueError, RecursionError):
            raise InvalidArgument(
                f"{method[1:]}: {len(raw)} bytes that are not a message of the method's type"
            ) from None
        return Checked(kind, raw) if method.startswith(f"/{PACKAGE}") else message

    async def _read(self, method: str, context: Any) -> bytes:
        try:
            async with asyncio.timeout(self._gate.limits.request_s):
                raw = await context.read()
        except TimeoutError:
            raise InvalidArgument(
                f"{method[1:]}: no request arrived within {self._gate.limits.request_s:g} s; send it at once"
            ) from None
        if raw is grpc.aio.EOF:
            raise InvalidArgument(f"{method[1:]}: no request; send one message")
        return bytes(raw)


def _last(metadata: Metadata, key: str) -> str | None:
    """The last value of a key, which is the one that Serve takes."""
    return next((value for name, value in reversed(metadata) if name == key), None)


async def _refuse(context: Any, error: Exception, method: str) -> None:
    """Ends a call whose handler failed. The text of an unexpected error stays in the log, since it may hold
    secrets."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    log.error("%s failed in the proxy", method, exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"{method[1:]}: internal error ({type(error).__name__}); see the log"
    )
