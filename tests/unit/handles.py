"""Calls of Serve's handles, without Serve."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Response:
    """The answer to a call. The call goes on when its await is cancelled, until `cancel`, as with Serve's."""

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self.call = asyncio.ensure_future(call)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.call).__await__()

    def cancel(self) -> None:
        """Cancels the call."""
        self.call.cancel()
