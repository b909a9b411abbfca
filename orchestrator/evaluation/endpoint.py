"""Responses of a model behind any endpoint of OpenAI's protocol."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from orchestrator.evaluation.journal import Answer
from orchestrator.evaluation.rows import Row, is_text
from quartet.config.base import MIB, ConfigError
from quartet.security.port import on_loopback
from quartet.threads import in_thread
from quartet.wire.backoff import LAST_TRY_S, Backoff, Deadline
from quartet.wire.errors import NotFound, ServiceError, Unauthenticated, Unavailable

LONGEST = 16 * MIB
"""Most bytes of an answer."""
_SAID = 300
"""Most characters of an endpoint's error that are repeated."""
_REFUSED_ROW = frozenset({400, 413, 422})
"""Statuses of a request that is wrong by itself."""
_MAY_PASS = frozenset({408, 409, 425, 429})


class _Busy(Exception):
    """The endpoint may answer later, after `pause_s` seconds or more, if it says so."""

    def __init__(self, said: str, pause_s: float | None = None) -> None:
        super().__init__(said)
        self.pause_s = pause_s


class _Refused(Exception):
    """The endpoint will never answer this request."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key goes to the address that the user gave, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows none: the answer is an error of status 3xx."""


class Endpoint:
    """Asks for one response at a time, again and again until a deadline."""

    def __init__(
        self,
        address: str,
        fields: Mapping[str, Any],
        key: str | None,
        *,
        chat: bool,
        seed: int | None,
        samples: int,
        timeout_s: float,
    ) -> None:
        """
        Args:
            address: such as https://api.example/v1, to which `/chat/completions` or `/completions` is added.
            fields: of each request, such as model and temperature.
            key: sent as a bearer token; None: none.
            chat: True to send a text as a user's message; messages are always sent as such.
            seed: seed of the first sample of the first row, the others having the next; None: none is sent.
            samples: number of samples of each row.
            timeout_s: longest time for a response, all tries together, in seconds.

        Raises:
            ConfigError: the address is none, or the key would cross a network in the clear.
        """
        try:
            place = urlsplit(address)
            host, fine = (
                place.hostname or "",
                place.scheme in ("http", "https") and place.port != 0 and "@" not in place.netloc,
            )
        except ValueError:
            host, fine = "", False
        if not fine or not host:
            raise ConfigError(f"--endpoint: should be such as https://api.example/v1, got {address!r}")
        if key and place.scheme == "http" and not on_loopback(host):
            raise ConfigError(
                f"--endpoint: {address} would get the key in the clear; use https, or --key-variable ''"
            )
        self._address, self._fields, self._key = address.rstrip("/"), dict(fields), key
        self._chat, self._seed, self._samples, self._timeout_s = chat, seed, samples, timeout_s
        # A proxy is for other machines.
        proxies = [urllib.request.ProxyHandler({})] if on_loopback(host) else []
        self._opener = urllib.request.build_opener(_NoRedirects(), *proxies)

    async def respond(self, index: int, row: Row, sample: int) -> Answer:
        """The answer to a row, the number of which is `index`.

        Raises:
            Unavailable: nothing listens there.
            ServiceError: the address, the model or the key is wrong.
        """
        chat = self._chat or bool(row.messages)
        asked: dict[str, Any] = (
            {"messages": [*row.messages] or [{"role": "user", "content": row.prompt}]}
            if chat
            else {"prompt": row.prompt}
        )
        if self._seed is not None:
            asked["seed"] = self._seed + index * self._samples + sample
        body = json.dumps(asked | self._fields).encode()
        deadline = Deadline(self._timeout_s)
        backoff = Backoff(deadline)
        lost: Unavailable | None = None
        while True:
            left_s = deadline.left_s
            try:
                return _answer(await self._reply(chat, body, deadline), chat)
            except _Refused as error:
                return Answer(None, problem=str(error))
            except Unavailable as error:
                lost = error
                await backoff.wait(error)
            except _Busy as error:
                if lost is not None and left_s < LAST_TRY_S:  # a last try, too short for an answer, says nothing new
                    raise lost from None
                try:
                    await backoff.wait(error, error.pause_s)
                except _Busy:
                    return Answer(None, problem=f"no answer in {self._timeout_s:g} s: {error}", may_pass=True)

    async def _reply(self, chat: bool, body: bytes, deadline: Deadline) -> Any:
        """The reply before the deadline. A socket's own limit is for each byte, and an answer's head or an error
        could come byte by byte for hours."""
        try:
            async with asyncio.timeout(deadline.left_s):
                return await in_thread(lambda: self._post(chat, body, deadline.left_s), "endpoint")
        except TimeoutError:
            raise _Busy("it is silent") from None

    def _post(self, chat: bool, body: bytes, left_s: float) -> Any:
        """The answer, as JSON."""
        request = urllib.request.Request(
            f"{self._address}/{'chat/' if chat else ''}completions",
            body,
            {"content-type": "application/json"} | ({"authorization": f"Bearer {self._key}"} if self._key else {}),
        )
        ends = time.monotonic() + left_s
        try:
            with self._opener.open(request, timeout=left_s) as reply:
                return json.loads(_within(reply, ends))
        except urllib.error.HTTPError as error:
            raise self._failure(error) from None
        except TimeoutError:
            raise _Busy("it is silent") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _Busy("it is silent") from None
            raise Unavailable(f"--endpoint {self._address}: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:  # a connection that breaks off
            raise _Busy(f"{type(error).__name__}: {error}") from None
        except (ValueError, RecursionError):
            raise _Busy("the answer is not JSON") from None

    def _failure(self, error: urllib.error.HTTPError) -> Exception:
        said = f"status {error.code}: {_said(error)}"
        if error.code in _REFUSED_ROW:
            return _Refused(said)
        if error.code in _MAY_PASS or (error.code >= 500 and error.code != 501):
            after = error.headers.get("retry-after") or ""
            return _Busy(said, float(after) if after.isdecimal() else None)
        kind: type[ServiceError] = Unauthenticated if error.code in (401, 403) else NotFound
        advice = "; the key is read from the variable that --key-variable names" if kind is Unauthenticated else ""
        return kind(f"--endpoint {self._address}: {said}{advice}")


def _within(reply: Any, ends: float) -> bytes:
    """The body of an answer that arrives before `ends`, however slowly it comes."""
    pieces: list[bytes] = []
    size = 0
    while piece := reply.read1(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > LONGEST:
            raise _Refused(f"an answer of more than {LONGEST // MIB} MiB")
        if time.monotonic() > ends:
            raise TimeoutError
    return b"".join(pieces)


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error."""
    try:
        body = error.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        found = json.loads(body)
        message = (
            found["error"]["message"] if isinstance(found.get("error"), dict) else found.get("detail", body.decode())
        )
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return _short(message) or str(error.reason)


def _short(said: Any) -> str:
    """The beginning of what an endpoint says, as text that UTF-8 can write."""
    return str(said)[:_SAID].encode(errors="replace").decode()


def _answer(reply: Any, chat: bool) -> Answer:
    """The answer in a reply. _Busy if the reply has no such form; _Refused if the model declined."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        reason, version = choice.get("finish_reason"), reply.get("policy_version")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _Busy("the answer has no choices[0]." + ("message.content" if chat else "text")) from None
    if not isinstance(text, str):
        declined = choice.get("message", {}).get("refusal") if chat else None
        raise _Refused(_short(f"declined: {declined}" if declined else f"no text (finish_reason {reason})"))
    if not is_text(text):
        raise _Refused("the answer holds half of a surrogate pair, which is not a character")
    return Answer(text, reason != "length" if reason else None, version if isinstance(version, int) else None)
