"""Parts of a replica's HTTP door that those of all services share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quartet.serving.share import Share, share_of
from quartet.wire.callers import Purpose
from quartet.wire.errors import ServiceError
from quartet.wire.http_errors import HttpError, http_error

log = logging.getLogger("quartet")
HEALTH_S = 10.0
"""Longest time, in seconds, that the answer to `/health` takes."""


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
    return Share(share.name, max(share.purpose, Purpose.EVALUATION))


def refusal(error: HttpError) -> Response:
    """An answer that is an error."""
    return Response(error.body, error.status, error.headers)


def refused(error: Exception, path: str) -> Response:
    """The answer for an error. Only the text of a ServiceError reaches the caller: others may hold secrets."""
    if isinstance(error, ServiceError):
        return refusal(http_error(error))
    log.error("%s failed", path, exc_info=error)
    return refusal(HttpError(500, f"internal error ({type(error).__name__}); see the log"))


async def health(check: Callable[[], Awaitable[None]]) -> Response:
    """The answer to `/health`, given a check that raises if the replica is ill."""
    try:
        async with asyncio.timeout(HEALTH_S):
            await check()
    except Exception as error:
        log.warning("unhealthy: %s", error)
        return refusal(HttpError(503, "the replica is not healthy; Serve will replace it", retry_after_s=1))
    return JSONResponse({"status": "serving"})
