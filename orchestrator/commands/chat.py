"""`quartet chat`: a conversation with the model that the rollout service serves, also while a run trains it."""

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from orchestrator.commands.up import openai_addresses
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from quartet.security.credentials import token_for
from quartet.wire.errors import Unavailable

TIMEOUT_S = 120.0
"""Longest wait, in seconds, for the next piece of an answer."""


class Chat:
    """One conversation. Each answer becomes part of the next question."""

    def __init__(self, address: str, token: str | None, **sampling: Any) -> None:
        """
        Args:
            address: of OpenAI's protocol, such as http://127.0.0.1:18000/rollout/v1.
            token: the caller's; None without one.
            sampling: fields of each request, such as temperature.
        """
        self._address, self._token, self._sampling = address, token, sampling
        self._messages: list[dict[str, str]] = []

    @classmethod
    def of(cls, deployment: Deployment, **sampling: Any) -> "Chat":
        """A conversation with the rollout service of a file.

        Raises:
            ConfigError: its HTTP port is closed, or it deploys no rollout service.
        """
        addresses = openai_addresses(deployment)
        if not deployment.port.http or not addresses:
            raise ConfigError(
                f"{deployment.path}: security.http: should be true, and a rollout service deployed here, to chat "
                "with it; then `quartet down` and `quartet up`"
            )
        return cls(addresses[0], token_for(deployment.orchestrator.target), **sampling)

    def say(self, text: str, show: Callable[[str], None]) -> int:
        """Says something; shows the answer piece by piece and returns the version of the weights that ended it.

        Raises:
            Unavailable: the service is not there, or broke off.
            ConfigError: the service refuses; the message is its own.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        answer, version = "", -1
        for event in self._events({"messages": asked, "stream": True} | self._sampling):
            if "error" in event:
                raise Unavailable(str(event["error"]["message"]))
            version = int(event["policy_version"])
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                answer += piece
                show(piece)
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return version

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        place = urlsplit(self._address)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=TIMEOUT_S)
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection.request("POST", f"{place.path}/chat/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise ConfigError(_reason(reply.read()))
            for line in reply:
                content = line.removeprefix(b"data: ").strip()
                if content and content != b"[DONE]":
                    yield json.loads(content)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._address}: {error or type(error).__name__}; is `quartet up` done?") from None
        finally:
            connection.close()


def _reason(body: bytes) -> str:
    """The message of an answer that is an error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
