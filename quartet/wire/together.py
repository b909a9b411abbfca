"""Work that costs much each time, done at once for all that wait for it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Result = TypeVar("Result")


class Together(Generic[Asked, Result]):
    """Gathers calls: one while another is carried out waits, with all others that come meanwhile."""

    def __init__(self, work: Callable[[Sequence[Asked]], Awaitable[Sequence[Result]]], most: int = 1 << 30) -> None:
        """`work` gives a result for each that it is asked for, of which there are `most` at a time. It goes on when
        callers are cancelled, also when all are: nothing then tells of its end, or of its error."""
        self._work, self._most = work, most
        self._waiting: list[tuple[Asked, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None
        """Carries the work out while some wait for it; no caller's own, as any of them may be cancelled."""

    async def __call__(self, asked: Asked) -> Result:
        """The result for one; the error of the work is that of all that were asked together."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, result))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._carry_out())
        return await result

    async def _carry_out(self) -> None:
        """Gives all their results, by and by."""
        together: list[tuple[Asked, asyncio.Future[Result]]] = []
        try:
            while self._waiting:
                await asyncio.sleep(0)  # for those that come at the same moment
                waiting = [(each, result) for each, result in self._waiting if not result.done()]
                together, self._waiting = waiting[: self._most], waiting[self._most :]
                if together:
                    await self._give(together)
        finally:
            for _, result in together + self._waiting:
                result.cancel()  # where this task is cancelled, as at the end of the loop; else all have theirs
            self._waiting = []

    async def _give(self, together: Sequence[tuple[Asked, asyncio.Future[Result]]]) -> None:
        results = [result for _, result in together]
        try:
            given = await self._work([each for each, _ in together])
            if len(given) != len(together):
                raise RuntimeError(f"{len(given)} results for {len(together)} that were asked for")
        except Exception as error:
            for result in results:
                if not result.done():
                    result.set_exception(error)
        else:
            for result, its in zip(results, given, strict=True):
                if not result.done():
                    result.set_result(its)
