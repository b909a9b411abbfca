"""Work beside the loop: tasks whose failures end it at once, and that end with it; and work for several at once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from quartet.threads import in_thread
from quartet.wire.together import Together

Asked = TypeVar("Asked")
Result = TypeVar("Result")


class Beside:
    """Tasks that go on beside a block of code, its context.

    The first that fails cancels the block, and its error is raised in place of the cancellation. Those that go on
    when the block ends are cancelled.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task; `name` is for messages of asyncio."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises a single error as it is, and several in a group."""
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            if len(failed.exceptions) > 1:
                raise
            raise failed.exceptions[0] from None


def together_in_thread(work: Callable[[Sequence[Asked]], Sequence[Result]], name: str) -> Together[Asked, Result]:
    """Gathers calls for work that gives a result for each, in a thread of its own with this name."""
    return Together(lambda asked: in_thread(lambda: work(asked), name))
