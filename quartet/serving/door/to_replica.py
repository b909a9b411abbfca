"""The way of a request from Serve's HTTP port to a replica, in the place of Serve's own.

Serve sends a request and fetches its body in two calls, one to the replica and one back, and makes an object of Ray's
of each part of the answer. Here a request is one streaming call, with the body, over the gRPC connection that a proxy
has to each replica. Serve still chooses the replica, counts the call and ends it.
"""

import asyncio
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from quartet.seams.serve import asks_over_http
from quartet.wire.errors import Unavailable

TAKEN_S = 5.0
"""Seconds within which a replica takes a request, if there is one."""


class ToReplica:
    """Has replicas answer requests that have passed the guard."""

    def __init__(self, app: Any) -> None:
        """
        Args:
            app: Serve's own.
        """
        self._ask = asks_over_http(app, TAKEN_S)

    async def answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Sends the answer to one request. Raises Unavailable if no replica takes it in time, what kept its replica
        from answering, and what `send` raises; ends when the caller leaves.

        Args:
            scope: the request.
            body: its whole body.
            receive: tells when the caller leaves.
            send: takes the messages of the answer.
        """
        answering = asyncio.ensure_future(self._answer(scope, body, send))
        leaving = asyncio.ensure_future(_left(receive))
        leaving.add_done_callback(lambda _: answering.cancel())
        try:
            await asyncio.wait((answering,))
            if not answering.cancelled():
                answering.result()
        finally:
            leaving.cancel()
            answering.cancel()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        path, headers = scope["path"], [(name.decode(), value.decode()) for name, value in scope["headers"]]
        async with aclosing(self._ask(path, body, scope["method"], headers)) as parts:
            try:
                status, sent, first = await anext(parts)
            except TimeoutError:
                raise Unavailable(f"no replica has taken the request in {TAKEN_S:g} s; ask again") from None
            await send({"type": "http.response.start", "status": status, "headers": sent})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    """Returns when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
