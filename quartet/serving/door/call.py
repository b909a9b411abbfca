"""A servicer context for Serve's proxy that stays readable after the caller has left."""

from collections.abc import Mapping, Sequence
from typing import Any

Metadata = tuple[tuple[str, Any], ...]


class CallContext:
    """A copy of a gRPC servicer context, taken while the call lives, with every method that Serve uses.

    gRPC frees a call when its caller leaves. Reading the peer of a freed call, as Serve's access log does, ends the
    process with SIGSEGV, and all services lose their proxy. This copy answers from memory and never touches a call
    that is over.
    """

    def __init__(self, context: Any, metadata: Metadata) -> None:
        """
        Args:
            context: gRPC's servicer context of a call in progress.
            metadata: metadata for Serve and the replica in place of the caller's own.
        """
        self._context = context
        self._metadata = metadata
        self._peer: str = context.peer()
        self._auth: Mapping[str, Any] = context.auth_context()
        self._identities = context.peer_identities()
        self._identity_key = context.peer_identity_key()
        self._code: Any = context.code()
        self._details: Any = context.details()
        self._trailing: Sequence[tuple[str, Any]] = tuple(context.trailing_metadata() or ())
        self._over = False
        context.add_done_callback(self._end)

    def _end(self, _: Any) -> None:
        self._over = True

    def invocation_metadata(self) -> Metadata:
        """The metadata for Serve and the replica."""
        return self._metadata

    def peer(self) -> str:
        """The caller's address."""
        return self._peer

    def auth_context(self) -> Mapping[str, Any]:
        """The caller's properties from TLS."""
        return self._auth

    def peer_identities(self) -> Any:
        """The names in the caller's certificate."""
        return self._identities

    def peer_identity_key(self) -> Any:
        """The property of `auth_context` that holds `peer_identities`."""
        return self._identity_key

    def code(self) -> Any:
        """The status set last."""
        return self._code

    def details(self) -> Any:
        """The details set last."""
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, Any]]:
        """The trailing metadata set last."""
        return self._trailing

    def set_code(self, code: Any) -> None:
        """Sets the status."""
        self._code = code
        if not self._over:
            self._context.set_code(code)

    def set_details(self, details: str) -> None:
        """Sets the status's details."""
        self._details = details
        if not self._over:
            self._context.set_details(details)

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, Any]]) -> None:
        """Sets the metadata that follows the reply."""
        self._trailing = trailing
        if not self._over:
            self._context.set_trailing_metadata(tuple(trailing))

    def set_compression(self, compression: Any) -> None:
        """Sets the compression of the reply."""
        if not self._over:
            self._context.set_compression(compression)

    def add_done_callback(self, callback: Any) -> None:
        """Calls `callback` when the call is over."""
        self._context.add_done_callback(callback)
