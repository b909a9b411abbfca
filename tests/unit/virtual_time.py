"""An event loop whose time is the test's: minutes pass at once, and on a busy machine no deadline passes early."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Arguments = ParamSpec("Arguments")


class Stuck(RuntimeError):
    """Every task waits for another, and no timer is set: the real loop would hang."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is `now`, in seconds, which a test may move forward."""

    def __init__(self, *, jumps: bool = False) -> None:
        """With `jumps`, time passes by itself: it jumps to the next timer as soon as nothing else is to be done. That
        is for tests without sockets, whose work takes real time; what they do in threads is done at once."""
        self.now, self._jumps = 0.0, jumps
        super().__init__(_Jumping(self) if jumps else None)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        if not self._jumps:
            return super().run_in_executor(executor, func, *args)
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise Stuck("every task waits for another")
        if timeout and not ready:
            self._loop.now += timeout
        return ready


def in_virtual_time(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """The same test in a loop of its own, whose time jumps."""

    @functools.wraps(test)
    def run(*arguments: Arguments.args, **fixtures: Arguments.kwargs) -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(jumps=True)) as runner:
            runner.run(test(*arguments, **fixtures))

    return run
