"""One request over HTTP and its answer, whatever the other end does: asked again while that may help, within a
deadline, bounded, and from no other address than the one that was asked."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from quartet.security.port import on_loopback
from quartet.wire.backoff import Backoff, Deadline

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that may be others when the request is sent again."""
_LONGEST_PAUSE_S = 60.0


class Exchanged(NamedTuple):
    """An answer."""

    status: int
    content: bytes
    pause_s: float
    """The pause that it asks for before the next request, in seconds."""


class TooLongError(Exception):
    """The answer has more bytes than it may have."""


class _BusyError(Exception):
    """The answer says that the other end is busy."""


def client(url: str, key: str) -> httpx.AsyncClient:
    """A client for an address, that sends the key, unless it is empty, as a bearer token. It follows no redirect, as
    the key and the pairs are for one address, and takes no compressed answer, as a few bytes of it may be
    gigabytes."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    # A proxy that the environment names is for other machines.
    straight = {"http://": None, "https://": None} if on_loopback(urlsplit(url).hostname or "") else None
    return httpx.AsyncClient(headers=headers, follow_redirects=False, mounts=straight)


async def exchange(
    asked: httpx.AsyncClient,
    method: str,
    url: str,
    body: Mapping[str, Any] | None,
    deadline: Deadline,
    most: int,
    *,
    busy: Collection[int] = BUSY,
) -> Exchanged:
    """Sends a request with a body of JSON, if any; again, after growing pauses, where none answers, or with a status
    of `busy`. Such an answer is given only if no other one has come when the deadline nears.

    Raises:
        TooLongError: the answer has more than `most` bytes.
        httpx.TimeoutException: it is not there whole at the deadline.
        httpx.HTTPError: there is none.
    """
    backoff = Backoff(deadline)
    while True:
        try:
            answer = await _once(asked, method, url, body, deadline, most)
            if answer.status not in busy:
                return answer
            await backoff.wait(_BusyError(), answer.pause_s)
        except _BusyError:
            return answer
        except httpx.TimeoutException:
            raise
        except httpx.HTTPError as error:
            await backoff.wait(error)


async def _once(
    asked: httpx.AsyncClient, method: str, url: str, body: Mapping[str, Any] | None, deadline: Deadline, most: int
) -> Exchanged:
    try:
        async with (
            asyncio.timeout(deadline.left_s),  # httpx's own limit is for each piece
            asked.stream(method, url, json=body, timeout=deadline.left_s) as reply,
        ):
            content = bytearray()
            async for part in reply.aiter_raw():
                content += part
                if len(content) > most:
                    raise TooLongError(f"has more than {most >> 20} MiB")
    except TimeoutError:
        raise httpx.ReadTimeout("the deadline has passed") from None
    return Exchanged(reply.status_code, bytes(content), _pause(reply))


def _pause(reply: httpx.Response) -> float:
    try:
        return min(max(0.0, float(reply.headers.get("retry-after", 0))), _LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
