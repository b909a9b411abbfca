"""Steps that run at most once, even if they are requested again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from quartet.wire.errors import FailedPrecondition

Result = TypeVar("Result")


class Once(Generic[Result]):
    """Runs each step once and keeps the last result, so that a retry after a lost reply is answered from memory.

    A step continues when its caller goes away: half a training step cannot be undone. For example a caller sends step
    5, loses the connection and sends step 5 again: it waits for the same training and gets its result.
    """

    def __init__(self) -> None:
        self.last_step = 0
        self._digest = b""
        self._result: asyncio.Future[Result] | None = None

    def restored(self, step: int) -> None:
        """Records that the state is now the one after `step`."""
        self.last_step, self._result = step, None

    async def run(
        self, step: int, digest: bytes, action: Callable[[], Awaitable[Result]], check: Callable[[], None]
    ) -> Result:
        """The result of `step`; runs `action` only if the step is new.

        A failed step may be run again.

        Args:
            step: number of the step, at least 1.
            digest: identifies everything that the result depends on.
            action: runs the step.
            check: raises if the caller may no longer begin a step; called after waiting for the step before.

        Raises:
            FailedPrecondition: `step` is older than the last one, had another digest, or ran before a checkpoint was
                restored, so that its result is gone.
        """
        while step > self.last_step or (step == self.last_step and self._failed()):
            check()
            if self._result is None or self._result.done():
                self.last_step, self._digest = step, digest
                self._result = asyncio.ensure_future(action())
                break
            # Looks again: another caller that waited for the step before may have begun the next one.
            await asyncio.wait([self._result])
        if step < self.last_step:
            raise FailedPrecondition(f"step: {step} is older than the last one trained, {self.last_step}")
        if self._result is None:
            raise FailedPrecondition(f"step: {step} was trained before a checkpoint was restored, its result is gone")
        if digest != self._digest:
            raise FailedPrecondition(f"step: {step} was trained on another batch, or by another schedule")
        return await asyncio.shield(self._result)

    def _failed(self) -> bool:
        result = self._result
        return result is not None and result.done() and (result.cancelled() or result.exception() is not None)
