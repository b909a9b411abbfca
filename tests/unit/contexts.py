"""A servicer context as a replica sees it, without gRPC."""

import grpc

from quartet.security.identity import ANONYMOUS, Caller
from quartet.wire.callers import Purpose, declared


class Context:
    """Remembers the status that was set, and declares a caller; `caller` is who the proxy found it to be."""

    def __init__(self, run: str = "run", purpose: Purpose = Purpose.TRAINING, caller: Caller = ANONYMOUS) -> None:
        self.code: grpc.StatusCode | None = None
        self.details: str | None = None
        self._metadata = declared(run, purpose) + (() if caller == ANONYMOUS else caller.metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata
