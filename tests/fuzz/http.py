"""Requests over HTTP that no client would send, drawn from the reward door's own OpenAPI page, and what is right of
an answer."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from tests.fuzz.fuzzer import LEAKS

AT_ONCE = 16
DEADLINE_S = 60.0
ALLOWED = frozenset({200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 417, 429, 431, 501})
"""Statuses that an answer may have; and 503, for a pair that is not scored where a protocol has no place for it."""
_LEAKS = LEAKS | {"a traceback": re.compile(r'Traceback|File \\?"')}
"""Without lines and columns, which are told of a body that is not JSON."""
_UNSCORED = re.compile(r"\w+\[\d+\]: (?:not applicable|timeout|failed|refused|not finite): ")
_NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    5,
    63,
    2**31 - 1,
    2**31,
    -(2**31),
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e308,
)
_TEXTS = ("", "w5", "w5 w6 w7", "w14", "w15", "w16", "w17", "naïve ✓", "\x00", "..", "a" * 3000, "%s%n{0}", "\u202e")
_NAMES = ("", "length", "taste", "two", "two/long", "length/score", "none", "../../length", "\x00", "a" * 300, "/")
_ODD: tuple[Any, ...] = (None, True, False, [], {}, "", 0, -1, 1.5, [[]], [None], {"a": 1}, "x" * 200, 10**400)
_CONTENT = (
    "application/json",
    "application/json",
    "application/json; charset=utf-8",
    "text/plain",
    "",
    "APPLICATION/JSON",
)
_SCORERS = ("length", "length", "length", "two", "two/words", "taste", "none", "..", "%2e%2e", "a" * 70)
_HEADERS = (
    ("Origin", "https://evil.example"),
    ("Host", "evil.example"),
    ("Content-Encoding", "gzip"),
    ("Transfer-Encoding", "gzip"),
    ("Expect", "100-continue"),
    ("Authorization", "Bearer \x01"),
    ("quartet-role", "trainer"),
    ("quartet-purpose", "training"),
    ("X-Long", "a" * 9000),
    ("Cookie", "a=b"),
    ("Content-Length", "7"),
    ("Content-Length", "-1"),
    ("Content-Length", "99999999999999999999"),
)


class HttpRequest(NamedTuple):
    """A request to send as it is."""

    number: int
    method: str
    path: str
    head: bytes
    body: bytes


def requests(
    page: Mapping[str, Any], seed: int, count: int, prefix: str = "/reward", more: str = ""
) -> Iterator[HttpRequest]:
    """`count` requests; the same ones for the same seed and page.

    Args:
        page: the OpenAPI page.
        seed: of the draws.
        count: of requests.
        prefix: of the application's paths.
        more: further lines of each head, such as a token's.
    """
    drawn = _Schema(page)
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        path, methods = rng.choice(sorted(page["paths"].items()))
        method = next(iter(methods))
        described = methods[method].get("requestBody")
        body = b""
        if described:
            body = _body(rng, drawn, described["content"]["application/json"]["schema"])
        verb, where = method.upper(), prefix + path
        if rng.random() < 0.5:
            where = f"{prefix}/scorers/{rng.choice(_SCORERS)}{path}"
        if rng.random() < 0.05:
            where = rng.choice((where + "/", where + "?scorer=two", "//" + where, where.upper(), "/x" + where, "*"))
        if rng.random() < 0.03:
            verb = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"))
        yield HttpRequest(number, verb, where, _head(rng, verb, where, body, more), body)


def _head(rng: random.Random, verb: str, path: str, body: bytes, more: str) -> bytes:
    lines = [f"{verb} {path} HTTP/1.1"]
    extra = [rng.choice(_HEADERS) for _ in range(rng.randint(1, 2))] if rng.random() < 0.06 else []
    names = {name for name, _ in extra}
    if "Host" not in names or rng.random() < 0.2:
        lines.append("Host: 127.0.0.1")
    if body or verb == "POST":
        lines.append(f"Content-Type: {rng.choice(_CONTENT) if rng.random() < 0.1 else 'application/json'}")
        if "Content-Length" not in names:
            lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in extra]
    text = "\r\n".join(lines) + "\r\n" + more + "\r\n"
    return text.encode("utf-8", "surrogateescape")


def _body(rng: random.Random, drawn: "_Schema", schema: Any) -> bytes:
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.choice((0, 1, 3, 17, 200, 5000)))
    if kind < 0.07:
        return rng.choice(
            (b"[" * 40, b'{"a":' * 40, b"{}", b"null", b"NaN", b'{"pairs": 1e999}', b'"\\ud800"', b"\xff\xfe{}")
        )
    value = drawn.value(rng, schema)
    if kind < 0.5:
        value = _spoilt(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    if kind > 0.9:
        changed = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed) + 1)
            changed[at:at] = rng.choice((b"", rng.randbytes(2), b'"', b"\\", b"[", b"}"))
            del changed[at : at + rng.randint(0, 3)]
        return bytes(changed)
    return text


def _spoilt(rng: random.Random, value: Any) -> Any:
    """The value with something in it that does not belong there."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        how = rng.random()
        if how < 0.2:
            return {key: each for key, each in value.items() if key != name}
        if how < 0.4:
            return value | {
                rng.choice(("chat_template", "lora", "a" * 500, "model", "scorer", "\x00")): rng.choice(_ODD)
            }
        return value | {name: _spoilt(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _spoilt(rng, value[at]), *value[at + 1 :]]
    return rng.choice(_ODD)


class _Schema:
    """Values of the page's schemas."""

    def __init__(self, page: Mapping[str, Any]) -> None:
        self._named = page["components"]["schemas"]

    def value(self, rng: random.Random, schema: Any, name: str = "", depth: int = 0) -> Any:
        """One that fits, more or less."""
        if "$ref" in schema:
            return self.value(rng, self._named[schema["$ref"].rpartition("/")[2]], name, depth)
        if "anyOf" in schema:
            return self.value(rng, rng.choice(schema["anyOf"]), name, depth)
        if "const" in schema or "enum" in schema:
            return schema.get("const", rng.choice(schema.get("enum", [None])))
        match schema.get("type"):
            case "object" if "properties" in schema:
                needed = schema.get("required", ())
                return {
                    key: self.value(rng, each, key, depth + 1)
                    for key, each in schema["properties"].items()
                    if key in needed or rng.random() < 0.4
                }
            case "object":
                return self._free(rng, name, depth)
            case "array":
                most = 40 if rng.random() < 0.02 else 3
                return [
                    self.value(rng, schema.get("items", {}), name, depth + 1) for _ in range(rng.randint(1, most))
                ]
            case "integer" | "number":
                return rng.randint(4, 63) if rng.random() < 0.7 else rng.choice(_NUMBERS)
            case "boolean":
                return rng.random() < 0.5
            case "string":
                return rng.choice(_NAMES if name in ("scorer", "model") else _TEXTS)
            case "null":
                return None
        return self._free(rng, name, depth)

    def _free(self, rng: random.Random, name: str, depth: int) -> Any:
        """A value that the page leaves open: for NeMo Gym's fields something like theirs."""
        said = {
            "role": "assistant",
            "type": "message",
            "content": [{"type": "output_text", "text": rng.choice(_TEXTS)}],
        }
        known = {
            "responses_create_params": {
                "input": rng.choice(("w5", [{"role": "user", "content": "w5"}], [], 5, None))
            },
            "response": {"output": rng.choice(([said], [said, said], [], None, "w5", [{"type": "function_call"}]))},
        }
        return known.get(name) or rng.choice(
            ({}, {"a": [1, {"b": None}]}, {"function_to_apply": "none", "top_k": 1}, *_ODD)
        )


@dataclass
class HttpVerdict:
    """The result of a round."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Answers that break the promise, each with the number that reproduces it."""
    slowest_s: float = 0.0

    def add(self, request: HttpRequest, status: int, kind: str, body: bytes, seconds: float) -> None:
        """Counts an answer and notes what is wrong with it."""
        self.statuses[status] += 1
        self.slowest_s = max(self.slowest_s, seconds)
        for fault in faults(request, status, kind, body):
            self.faults.append(f"request {request.number}, {request.method} {request.path[:80]}: {status}: {fault}")


def faults(request: HttpRequest, status: int, kind: str, body: bytes) -> Iterator[str]:
    """The promises that an answer breaks."""
    text = body.decode(errors="replace")
    sent = request.body.decode(errors="replace") + unquote(request.head.decode(errors="replace"))
    if status not in ALLOWED and not (status == 503 and _UNSCORED.search(text)):
        yield text[:300]
    for leak, pattern in _LEAKS.items():
        found = pattern.search(text) if "json" in kind else None
        if found and found[0] not in sent and json.dumps(found[0])[1:-1] not in sent and status != 200:
            yield f"tells {leak}: {found[0]!r} in {text[:300]!r}"
    if request.method == "HEAD" or not text or "json" not in kind:
        if status >= 400 and not text and request.method != "HEAD":
            yield "without a word"
        return
    try:
        given = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        yield f"not JSON: {error}"
        return
    if status >= 400 and not given["error"]["message"]:
        yield "without a message"
    for result in given["results"] if "/v1/rewards" in request.path and status == 200 else ():
        if (result["outcome"] == "scored") != (result["scores"] is not None):
            yield f"a result that is {result['outcome']} has {result['scores']}"


def _no_number(text: str) -> Any:
    raise ValueError(f"holds {text}")


async def fuzz(port: int, sent: Iterable[HttpRequest], look: Callable[[int], None] = lambda _: None) -> HttpVerdict:
    """Sends all requests, AT_ONCE of them at a time. `look` is called with the number of each that is answered."""
    verdict, waiting = HttpVerdict(), iter(sent)

    async def caller() -> None:
        connection = _Connection(port)
        for request in waiting:
            began = time.monotonic()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    answer = await connection.ask(request)
            except TimeoutError:
                verdict.faults.append(f"request {request.number}, {request.method} {request.path[:80]}: no answer")
                connection.close()
                continue
            verdict.add(request, *answer, time.monotonic() - began)
            look(request.number)
        connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(caller())
    return verdict


class _Connection:
    """A connection that sends what it is given and is opened again where the other end has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: HttpRequest) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer."""
        for fresh in (False, True):
            if self._ends is None or fresh:
                self.close()
                self._ends = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 25)
            try:
                return await self._asked(*self._ends, request)
            except (ConnectionError, asyncio.IncompleteReadError):
                if fresh:
                    self.close()
                    return 400, "", b"closed"  # as where no request could be made of the bytes
        raise AssertionError

    async def _asked(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: HttpRequest
    ) -> tuple[int, str, bytes]:
        writer.write(request.head + request.body)
        # A head that announces more than follows would be waited for.
        ended = f"Content-Length: {len(request.body)}\r\n".encode() not in request.head and bool(request.body)
        if ended:
            writer.write_eof()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        while head.startswith("HTTP/1.1 100"):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status, kind = int(first.split()[1]), headers.get("content-type", "")
        if request.method == "HEAD":
            self.close()
            return status, kind, b""
        if headers.get("transfer-encoding") == "chunked":
            body = await _chunks(reader)
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:  # as uvicorn itself answers where no request can be made of the bytes
            body = await reader.read()
        # Of what was announced and not sent, the other end would take the next request.
        announced = re.findall(rb"Content-Length: (\S*)", request.head)
        undecided = announced not in ([], [str(len(request.body)).encode()])
        if headers.get("connection") == "close" or ended or undecided or writer.transport.is_closing():
            self.close()
        return status, kind, body

    def close(self) -> None:
        """Closes it."""
        if self._ends is not None:
            self._ends[1].close()
        self._ends = None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(pieces)
