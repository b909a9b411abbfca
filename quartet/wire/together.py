"""Work that costs much each time, done at once for all that wait for it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Result = TypeVar("Result")


class Together(Generic[Asked, Result]):
    """Gathers calls: one while another is carried out waits, with all others that come meanwhile."""

    def __init__(self, work: Callable[[Sequence[Asked]], Awaitable[Sequence[Result]]], most: int = 1 << 30) -> None:
        """`work` gives a result for each that it is asked for, of which there are `most` at a time."""
        self._work, self._most = work, most
        self._busy = asyncio.Lock()
        self._waiting: list[tuple[Asked, asyncio.Future[Result]]] = []

    async def __call__(self, asked: Asked) -> Result:
        """The result for one; the error of the work is that of all that were asked together."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, result))
        async with self._busy:
            if not result.done():
                await asyncio.sleep(0)  # for those that come at the same moment
                together, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                results = [one for _, one in together]
                try:
                    given = await self._work([each for each, _ in together])
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
