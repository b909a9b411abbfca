"""The messages in which a replica answers requests over HTTP."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from quartet.seams.serve import HTTP_METHOD, LARGEST_MESSAGE
from quartet.serving.http import HttpMixin, Streamed

LARGE = b"a" * (2 * LARGEST_MESSAGE + 1)


class Closed:
    """An answer in parts, which tells whether it is closed."""

    def __init__(self, *parts: bytes) -> None:
        self.parts, self.closed = parts, False

    async def events(self) -> AsyncGenerator[bytes, None]:
        for part in self.parts:
            yield part

    async def close(self) -> None:
        self.closed = True


def parts_of(response: Response) -> AsyncGenerator[Any, None]:
    async def answer(_: Any) -> Response:
        return response

    replica: Any = SimpleNamespace(answer=answer)
    called: AsyncGenerator[Any, None] = getattr(HttpMixin, HTTP_METHOD)(replica, "/", "/v1/models", b"", "GET", [])
    return called


async def test_an_answer_is_one_message() -> None:
    [(status, headers, body)] = [part async for part in parts_of(JSONResponse({"a": 1}, 201))]
    assert (status, dict(headers)[b"content-length"], body) == (201, b"7", b'{"a":1}')


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_message_is_larger_than_may_be(streamed: bool) -> None:
    source = Closed(LARGE, b"b", LARGE)
    whole = b"".join(source.parts)
    response = Streamed(source.events(), source.close) if streamed else Response(whole)
    (_, _, first), *rest = [part async for part in parts_of(response)]
    assert max(map(len, (first, *rest))) == LARGEST_MESSAGE
    assert b"".join((first, *rest)) == whole
    assert source.closed == streamed


async def test_a_stream_without_events_is_an_answer() -> None:
    source = Closed()
    [(status, _, first)] = [part async for part in parts_of(Streamed(source.events(), source.close))]
    assert (status, first, source.closed) == (200, b"", True)


async def test_a_caller_that_leaves_closes_the_stream() -> None:
    source = Closed(b"a", b"b", b"c")
    parts = parts_of(Streamed(source.events(), source.close))
    assert (await anext(parts))[-1] == b"a"
    assert await anext(parts) == b"b"
    await parts.aclose()
    assert source.closed
