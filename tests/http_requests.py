"""HTTP requests by Python's own client, to the last header as a test wants them."""

import asyncio
import http.client
import json
from collections.abc import Iterable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's contents."""
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The message of an answer that is an error in OpenAI's form."""
        error = self.json["error"]
        assert error["code"] == self.status
        assert error["type"]
        return str(error["message"])

    @property
    def events(self) -> list[Any]:
        """The contents of a stream's events but the last, which says that it is done."""
        *events, last = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


JSON = ("Content-Type", "application/json")


def bearer(token: str) -> tuple[str, str]:
    """The header with a token."""
    return ("Authorization", f"Bearer {token}")


async def ask(
    port: int,
    path: str,
    body: Any = None,
    *headers: tuple[str, str],
    method: str = "",
    host: str | None = None,
) -> Answer:
    """One request to a port of this machine: a GET without a body, else a POST of bytes, or of anything as JSON."""
    sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = [] if body is None or any(name == JSON[0] for name, _ in headers) else [JSON]
    verb = method or ("GET" if body is None else "POST")
    return await asyncio.to_thread(_ask, port, verb, path, sent, [*kind, *headers], host)


def _ask(
    port: int, method: str, path: str, body: bytes | None, headers: Iterable[tuple[str, str]], host: str | None
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
        for name, value in headers:
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        if body:
            connection.send(body)
        got = connection.getresponse()
        try:
            said = got.read()
        except ConnectionResetError:
            # A door that refuses a request for its head closes before it has read the body, and TCP then takes back
            # what is still unread of the answer.
            if got.status < 400:
                raise
            said = b""
        return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, said)
    finally:
        connection.close()
