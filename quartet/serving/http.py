"""Parts of a replica's HTTP door that those of all services share."""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope

from quartet.seams.serve import LARGEST_MESSAGE
from quartet.serving.share import Share, share_of
from quartet.wire.callers import Purpose
from quartet.wire.errors import ServiceError
from quartet.wire.http_errors import HttpError, http_error

log = logging.getLogger("quartet")


class HttpMixin(ABC):
    """Answers what the guard of the HTTP port passes on, by the name HTTP_METHOD (quartet/seams/serve.py)."""

    @abstractmethod
    async def answer(self, request: Request) -> ASGIApp:
        """The answer to a request, which is an application of ASGI as every Response is."""

    async def http(
        self, prefix: str, path: str, body: bytes, method: str, headers: Sequence[tuple[str, str]]
    ) -> AsyncGenerator[Any, None]:
        """The answer to a request that the guard has let through: its status, its headers and the first part of its
        body, then the other parts.

        Args:
            prefix: the application's route prefix.
            path: the whole path.
            body: the request's.
            method: GET or POST.
            headers: those that the guard passes on, and the caller's identity.
        """
        given = [(name.encode(), value.encode()) for name, value in headers]
        asked = {"path": path, "root_path": prefix.rstrip("/"), "headers": given, "query_string": b""}
        scope: Scope = {"type": "http", "method": method, **asked}

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        response = await self.answer(Request(scope, receive))
        async with aclosing(_parts(response, scope, receive)) as parts:
            status, sent, first = await anext(parts)
            first, *others = _pieces(first)
            yield status, sent, first
            for piece in others:
                yield piece
            async for part in parts:
                for piece in _pieces(part):
                    yield piece


async def _parts(response: ASGIApp, scope: Scope, receive: Receive) -> AsyncGenerator[Any, None]:
    """The answer as `http` gives it, in parts of any size."""
    if isinstance(response, Streamed):
        async with aclosing(response):
            yield response.status_code, response.raw_headers, await anext(response.parts, b"")
            async for part in response.parts:
                yield part
        return
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await response(scope, receive, send)
    start, *rest = messages
    yield start["status"], start["headers"], b"".join(message["body"] for message in rest)


def _pieces(part: bytes) -> list[bytes]:
    """A part of an answer, divided into messages; one at least."""
    return [part[at : at + LARGEST_MESSAGE] for at in range(0, len(part) or 1, LARGEST_MESSAGE)]


class Streamed(Response):
    """An answer that is sent as it is made, and has to be closed."""

    def __init__(self, parts: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            parts: the events.
            close: called at the end, however it comes.
        """
        self.parts, self._close = parts, close
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]

    async def aclose(self) -> None:
        """Ends it."""
        try:
            await self.parts.aclose()
        finally:
            await self._close()


class HeaderMetadata:
    """A request's headers in the place of a call's metadata."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def invocation_metadata(self) -> Any:
        """The headers, of which the proxy has set the caller's identity."""
        return self._request.headers.items()


def share_of_request(request: Request) -> Share:
    """The share of a request. No training step waits for one over HTTP, whatever it declares."""
    share = share_of(HeaderMetadata(request))
    return replace(share, purpose=max(share.purpose, Purpose.EVALUATION))


def refusal(error: HttpError) -> Response:
    """An answer that is an error."""
    return Response(error.body, error.status, error.headers)


def refused(error: Exception, path: str) -> Response:
    """The answer for an error. Only the text of a ServiceError reaches the caller: others may hold secrets."""
    if isinstance(error, ServiceError):
        return refusal(http_error(error))
    log.error("%s failed", path, exc_info=error)
    return refusal(HttpError(500, f"internal error ({type(error).__name__}); see the log"))


def health(serving: bool) -> Response:
    """The answer to `/health`."""
    if serving:
        return JSONResponse({"status": "serving"})
    return refusal(HttpError(503, "the replica is not healthy; Serve will replace it", retry_after_s=1))
