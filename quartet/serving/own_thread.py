"""One thread, beside the event loop, for all work with a model."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class OwnThread:
    """Runs functions one after another in a dedicated thread."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Runs the function in the thread; returns or raises as it does."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, _contained, function, arguments)


def _contained(function: Callable[..., Answer], arguments: tuple[Any, ...]) -> Answer:
    """Calls a function and turns errors that would stop an event loop into RuntimeError: those that end a thread or
    program (SystemExit, KeyboardInterrupt, CancelledError), and StopIteration, which a future cannot hold."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
