"""The HTTP door of a replica: what the guard of Serve's proxy let through, answered by an engine's own door."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quartet.serving.admission import Admission
from quartet.serving.share import Share, share_of
from quartet.serving.slots import EngineSlots
from quartet.wire.callers import Purpose
from quartet.wire.errors import ServiceError
from quartet.wire.http_errors import HttpError, http_error

if TYPE_CHECKING:  # the replica needs neither before it starts
    from services.rollout.interface import Engine

log = logging.getLogger("quartet")
HEALTH_S = 10.0
"""Longest time, in seconds, that the answer to `/health` takes."""


class Completions(Protocol):
    """An engine's answers in OpenAI's protocol."""

    async def answer(self, path: str, body: bytes, share: Share) -> Response:
        """Answers a request with a body: for a completion, a chat's answer, or tokens.

        Raises:
            ServiceError: the request is refused.
        """

    async def models(self) -> Any:
        """The contents of `/v1/models`."""

    async def tokenizer_info(self) -> Any:
        """The contents of `/tokenizer_info`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The parts of a replica that a door needs."""

    engine: "Engine"
    admission: Admission
    slots: EngineSlots
    run: Callable[[], str]
    """Returns the name of the run that holds the replica; empty if none does."""
    beat: Callable[[], None]
    """Raises Unavailable if the engine stands still."""


class Door:
    """Answers the requests of one replica."""

    def __init__(self, completions: Completions, check_health: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            completions: the engine's.
            check_health: raises if the replica is ill.
        """
        self._completions, self._check_health = completions, check_health

    async def answer(self, request: Request) -> Response:
        """Answers a request. An error is an answer too, in the form that OpenAI's clients read."""
        scope = request.scope
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        try:
            if path == "/health":
                return await self._health()
            if path == "/v1/models":
                return JSONResponse(await self._completions.models())
            if path == "/tokenizer_info":
                return JSONResponse(await self._completions.tokenizer_info())
            return await self._completions.answer(path, await request.body(), _share(request))
        except ServiceError as error:
            return refusal(http_error(error))
        except Exception as error:
            log.exception("%s failed", path)
            return refusal(HttpError(500, f"internal error ({type(error).__name__}); see the log"))

    async def _health(self) -> Response:
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._check_health()
        except Exception as error:
            log.warning("unhealthy: %s", error)
            return refusal(HttpError(503, "the replica is not healthy; Serve will replace it", retry_after_s=1))
        return JSONResponse({"status": "serving"})


def refusal(error: HttpError) -> Response:
    """An answer that is an error."""
    return Response(error.body, error.status, error.headers)


class _Headers:
    """A request's headers in the place of a call's metadata."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def invocation_metadata(self) -> Any:
        """The headers, of which the proxy has set the caller's identity."""
        return self._request.headers.items()


def _share(request: Request) -> Share:
    """The share of a request. No training step waits for one over HTTP, whatever it declares."""
    share = share_of(_Headers(request))
    return Share(share.name, max(share.purpose, Purpose.EVALUATION))
