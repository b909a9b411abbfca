"""Bearer tokens on the caller's side, read from their file for each call so that a new token takes effect at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from quartet.config.base import ConfigError
from quartet.security.authentication import AUTHORIZATION


class _TokenFile:
    """A token's file, and the token that was read from it last, which is sent on if the file is removed: a cleaner of
    the folder then ends no run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = ""

    def header(self) -> tuple[str, str]:
        """The header with the token. OSError if the file cannot be read and never could."""
        try:
            self._last = self.path.read_text(encoding="utf-8").strip()
        except OSError:
            if not self._last:
                raise
        return AUTHORIZATION, f"Bearer {self._last}"


class BearerPlugin(grpc.AuthMetadataPlugin):
    """Sends the token in a file with every call over TLS."""

    def __init__(self, token: Path) -> None:
        self._token = _TokenFile(token)

    def __call__(self, context: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        try:
            callback((self._token.header(),), None)
        except OSError as error:
            callback((), error)


class _Bearer:
    """Sends the token in a file with every call on a channel without TLS."""

    def __init__(self, token: _TokenFile) -> None:
        self._token = token

    def _with_token(self, details: Any) -> Any:
        """The call's details with the token. ConfigError if its file was gone before the first call."""
        try:
            header = self._token.header()
        except OSError as error:
            raise ConfigError(
                f"{self._token.path}: the token for this service cannot be read ({error.strerror}); `quartet down` "
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
    file = _TokenFile(token)
    return [_Unary(file), _Stream(file), _BothWays(file)]
