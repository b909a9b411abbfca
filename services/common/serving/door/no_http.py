"""Serve's HTTP port without HTTP: the services speak gRPC only."""

from typing import Any

_BODY = b"the services answer over gRPC only\n"


class NoHttp:
    """ASGI middleware that answers every request itself, with 404.

    Serve also opens an HTTP port, and gRPC calls reach only applications that have an HTTP route too. Without this, a
    request that a web page makes a browser of this machine send would reach a replica.
    """

    def __init__(self, app: Any) -> None:
        """Wraps `app`, which gets only the events of its start and end."""
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request with 404 and a line of text."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(_BODY)).encode())]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
