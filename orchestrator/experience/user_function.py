"""A function of the user's, an environment's answer or an agent: called in time, again where it fails, and named."""

import asyncio
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

from orchestrator.environments.agent import Task
from orchestrator.environments.config import PAUSE_S
from orchestrator.environments.contract import Turn
from quartet.config.base import ConfigError
from quartet.tasks import ended
from quartet.threads import in_thread

Result = TypeVar("Result")
log = logging.getLogger("quartet")

_SAID = 500
"""Most characters of an error that are repeated."""


class Failed(Exception):
    """An attempt came to nothing; the message says why."""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function that may raise anything, and never return: a plain one, which is called in a thread of its own, or a
    coroutine function, on the event loop."""

    function: Callable[[Any], Any]
    section: str
    """Section of the orchestrator's configuration that names it, such as agent."""
    key: str
    """Key of `seconds` there."""
    seconds: float
    """Longest time of a call."""
    attempts: int
    """Attempts, of which the last ends the run."""
    result: Callable[[Any], Any] = lambda returned: returned
    """Makes the result of what is returned; what it raises is a failure of the function."""

    @property
    def on_loop(self) -> bool:
        """True if it is called on the event loop."""
        return iscoroutinefunction(self.function)

    async def attempted(
        self,
        attempt: Callable[[], Awaitable[Result]],
        where: str,
        on_repeat: Callable[[int], None] = lambda count: None,
    ) -> Result:
        """The result of the first attempt that does not raise Failed. ConfigError if none is left: it begins with
        `where`, and says why the last has failed, and what to do. Calls `on_repeat` with 1 before each but the
        first."""
        number = 0
        while True:
            number += 1
            try:
                return await attempt()
            except Failed as error:
                if number == self.attempts:
                    raise ConfigError(
                        f"{where}: {error}, the last of {number} attempts (orchestrator.{self.section}.{self.key}, "
                        f"attempts); mend it, and go on with --resume, after a change of the {self.section}'s file "
                        "with --accept-changed-services"
                    ) from error
            await asyncio.sleep(number * PAUSE_S)
            on_repeat(1)

    async def __call__(self, given: Task | Turn) -> Any:
        """The result of one call. Failed if it raises anything, or is late."""
        call = asyncio.ensure_future(self._called(given))
        late = ""
        try:
            await asyncio.wait([call], timeout=self.seconds)
        finally:
            if not call.done():
                late = f"took longer than {self.seconds:g} s"
                if await ended([call]):
                    log.warning("%s: goes on though it is cancelled, and is left behind", self._name(given))
                elif not call.cancelled():
                    call.exception()  # or asyncio complains that nothing has asked for it
        try:
            result = call.result()
        except (Exception, asyncio.CancelledError) as error:  # the user's own code, which may raise anything
            raise Failed((late or f"failed with {repr(error)[:_SAID]}") + self._line(error)) from error
        if late:
            raise Failed(late)
        return result

    async def _called(self, given: Task | Turn) -> Any:
        try:
            if self.on_loop:
                returned = self.function(given)
            else:
                call = functools.partial(_outcome, self.function, given)
                returned, error = await in_thread(call, self._name(given))
                if error is not None:
                    raise error
            # A plain function may give one too, such as a coroutine function that is wrapped in another.
            return self.result(await returned if isawaitable(returned) else returned)
        except SystemExit as error:  # which would end the run as if it were the run's own
            raise RuntimeError(repr(error)).with_traceback(error.__traceback__) from None

    def _name(self, given: Task | Turn) -> str:
        return f"{self.section}, sample {given.sample}"

    def _line(self, error: BaseException) -> str:
        """The line of the function's module that led to an error; empty if it is not known."""
        # A method may be inherited from a class of ours.
        module = getattr(getattr(self.function, "__self__", self.function), "__module__", "")
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_globals.get("__name__") == module]
        return f" at line {lines[-1]} of {module}" if lines else ""


def _outcome(function: Callable[[Any], Any], given: Any) -> tuple[Any, BaseException | None]:
    """The value that a function returns, and the error that it raises, with its lines, which a future may lose."""
    try:
        return function(given), None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error
