"""Bearer tokens on the caller's side, read from their file for each call so that a new token takes effect at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from services.common.config.base import ConfigError
from services.common.security.authentication import AUTHORIZATION


def _header(token: Path) -> tuple[str, str]:
    """The header with the token in a file. OSError if the file cannot be read."""
    return AUTHORIZATION, f"Bearer {token.read_text(encoding='utf-8').strip()}"


class BearerPlugin(grpc.AuthMetadataPlugin):
    """Sends the token in a file with every call over TLS."""

    def __init__(self, token: Path) -> None:
        self._token = token

    def __call__(self, context: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        try:
            callback((_header(self._token),), None)
        except OSError as error:
            callback((), error)


class _Bearer:
    """Sends the token in a file with every call on a channel without TLS."""

    def __init__(self, token: Path) -> None:
        self._token = token

    def _with_token(self, details: Any) -> Any:
        """The call's details with the token. ConfigError if its file is gone."""
        try:
            header = _header(self._token)
        except OSError as error:
            raise ConfigError(
                f"{self._token}: the token for this service cannot be read ({error.strerror}); `quartet down` "
                "removes it: are the services up?"
            ) from None
        return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), header))


class _Unary(_Bearer, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _Stream(_Bearer, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _BothWays(_Bearer, grpc.aio.StreamStreamClientInterceptor):
    """For calls that stream requests, such as reflection; Quartet's services have none."""

    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)


def bearer_interceptors(token: Path) -> Sequence[grpc.aio.ClientInterceptor]:
    """Interceptors that send the token on a channel without TLS, one for each kind of call."""
    return [_Unary(token), _Stream(token), _BothWays(token)]
