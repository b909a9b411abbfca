"""Work that costs much each time, done at once for all that wait for it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Result = TypeVar("Result")


class Together(Generic[Asked, Result]):
    """Gathers calls: one while another is carried out waits, with all others that come meanwhile."""

    def __init__(self, work: Callable[[Sequence[Asked]], Awaitable[Sequence[Result]]], most: int = 1 << 30) -> None:
        """`work` gives a result for each that it is asked for, of which there are `most` at a time. It is begun again
        if the caller that carries it out is cancelled and others are left."""
        self._work, self._most = work, most
        self._busy = asyncio.Lock()
        self._waiting: list[tuple[Asked, asyncio.Future[Result]]] = []

    async def __call__(self, asked: Asked) -> Result:
        """The result for one; the error of the work is that of all that were asked together."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, result))
        try:
            async with self._busy:
                while not result.done():
                    await asyncio.sleep(0)  # for those that come at the same moment
                    await self._carry_out()
            return result.result()
        finally:
            result.cancel()  # of a caller that was cancelled, for which nothing is done any more

    async def _carry_out(self) -> None:
        """Gives the next their results."""
        waiting = [(each, result) for each, result in self._waiting if not result.done()]
        together, self._waiting = waiting[: self._most], waiting[self._most :]
        results = [result for _, result in together]
        try:
            given = await self._work([each for each, _ in together])
            if len(given) != len(together):
                raise RuntimeError(f"{len(given)} results for {len(together)} that were asked for")
        except Exception as error:
            for result in results:
                if not result.done():
                    result.set_exception(error)
        except asyncio.CancelledError:  # this caller's alone
            self._waiting = together + self._waiting
            raise
        else:
            for result, its in zip(results, given, strict=True):
                if not result.done():
                    result.set_result(its)
