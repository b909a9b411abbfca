"""Private names of gRPC: its asynchronous server, made to survive calls of methods that do not exist."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc._cython import cygrpc

VERSIONS = ">=1.80,<1.86"
"""Versions of grpcio."""


class RefusesUnknownMethods(cygrpc.AioServer):  # type: ignore[misc]  # compiled, without types
    """Answers calls of unknown methods itself, without reading the method's name.

    gRPC's own class decodes that name as UTF-8 in the loop that accepts all calls. A name that is not UTF-8 ends the
    loop and with it the server, for all callers, before anything asks who calls. Registered methods are told apart
    before that loop, so this class registers all that exist, and only the others are left.
    """

    def __init__(self, *arguments: Any) -> None:
        """Takes the arguments of gRPC's own class."""
        self._by_handler: set[str] = set()
        self._registered: set[str] = set()
        self._refusals: set[asyncio.Task[None]] = set()
        super().__init__(*arguments)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Adds handlers of generated code, which list their methods."""
        super().add_generic_rpc_handlers(handlers)
        self._by_handler |= {method for handler in handlers for method in handler._method_handlers}

    def add_registered_method_handlers(self, handlers: Mapping[str, Any]) -> None:
        """Registers methods by their full names; a method whose handler is None is handled as added before."""
        super().add_registered_method_handlers(handlers)
        self._registered |= set(handlers)

    async def start(self) -> None:
        """Starts the server, once all handlers are added."""
        self.add_registered_method_handlers(dict.fromkeys(self._by_handler - self._registered))
        await super().start()

    async def _request_call(self) -> Any:
        """Takes the calls of unknown methods. Never returns; ends with gRPC's own error when the server stops."""
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(_refuse(call))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(grpc.aio.AbortError, cygrpc.ExecuteBatchError):  # the latter if the caller has left
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
