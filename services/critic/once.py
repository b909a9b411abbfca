"""Steps that run at most once, however often they are asked for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from services.common.errors import FailedPrecondition

Result = TypeVar("Result")


class Once(Generic[Result]):
    """Remembers the last step's result, so that a retry after a lost reply is answered from memory.

    A caller that goes away does not stop a step: half a training step cannot be taken back.
    """

    def __init__(self) -> None:
        self.last_step = 0
        self._result: asyncio.Future[Result] | None = None

    def restored(self, step: int) -> None:
        """What is known now is the state after `step`, whatever came before or since."""
        self.last_step, self._result = step, None

    async def run(self, step: int, action: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `step`, running `action` only if it is new.

        A step that failed may be tried again.

        Raises:
            FailedPrecondition: `step` is older than the last one, or its result was not among what was restored.
        """
        while step > self.last_step or (step == self.last_step and self._failed()):
            if self._result is None or self._result.done():
                self.last_step = step
                self._result = asyncio.ensure_future(action())
                break
            # Whoever else waits here for the step before may be the one to begin the next: look again.
            await asyncio.wait([self._result])
        if step < self.last_step:
            raise FailedPrecondition(f"step: {step} is older than the last one trained, {self.last_step}")
        if self._result is None:
            raise FailedPrecondition(f"step: {step} was trained before a checkpoint was restored, its result is gone")
        return await asyncio.shield(self._result)

    def _failed(self) -> bool:
        result = self._result
        return result is not None and (result.done() and (result.cancelled() or result.exception() is not None))
