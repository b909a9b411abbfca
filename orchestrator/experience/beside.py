"""Work beside the loop: tasks whose failures end it at once, and that end with it; and work for several at once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from quartet.threads import in_thread

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


class Together(Generic[Asked, Result]):
    """Work that costs much each time, done at once for all that wait for it: a call while another is carried out
    waits, with all others that come meanwhile."""

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Result]], name: str) -> None:
        """`work` gives a result for each that it is asked for, in a thread of its own; `name` is the thread's."""
        self._work, self._name = work, name
        self._busy = asyncio.Lock()
        self._waiting: list[tuple[Asked, asyncio.Future[Result]]] = []

    async def __call__(self, asked: Asked) -> Result:
        """The result for one; the error of the work is that of all that were asked together."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, result))
        async with self._busy:
            if not result.done():
                together, self._waiting = self._waiting, []
                results = [one for _, one in together]
                try:
                    given = await in_thread(lambda: self._work([each for each, _ in together]), self._name)
                except Exception as error:
                    for one in results:
                        if not one.done():
                            one.set_exception(error)
                except asyncio.CancelledError:  # with the whole run, whose other conversations end too
                    for one in results:
                        one.cancel()
                    raise
                else:
                    for one, its in zip(results, given, strict=True):
                        if not one.done():
                            one.set_result(its)
        return await result
