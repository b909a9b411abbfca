"""An event loop in virtual time: a pause costs nothing, and a wait for nothing is an error."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class Stuck(RuntimeError):
    """Every task waits for another, and no timer is set: the real loop would hang."""


class _Leaping(selectors.SelectSelector):
    """Waits for no file; the clock leaps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("every task waits for another")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0 and leaps from timer to timer."""

    def __init__(self) -> None:
        self._leaping = _Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Calls the function at once, in this thread."""
        future = self.create_future()
        future.set_result(func(*args))
        return future
