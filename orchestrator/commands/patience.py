"""The patience of a start: it asks again while services are being replaced, says whom it waits for, and ends at a
deadline."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from orchestrator.clients import Infos, Services
from orchestrator.commands.restarts import RECOVERABLE
from orchestrator.deployment.cluster import Cluster, applications, running
from orchestrator.deployment.file import Deployment
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.errors import LeaseLost, Unavailable, leaves, reasons

Answer = TypeVar("Answer")

NOTE_EVERY_S = 10.0
"""Seconds between two notes about one wait."""
LOOK_S = 1.0
"""Seconds between looks whether a note is due."""
FIRST_S = 3.0
"""Deadline of the first try in seconds; that of each further one is twice as long, up to `timeouts.info_s`."""
HEAD_S = 30.0
"""Seconds within which Serve, on a head that runs, has replaced a process that it lost and describes its
applications."""


class Patience:
    """Repeats what fails because a process is lost or silent. All waits of one start share its deadline, after which
    nothing is repeated; what is then asked for the first time still gets FIRST_S.

    For example, with a deadline of 300 s and a critic that is being replaced: the first Info ends after 3 s, which
    the user is told, the next ones after 6, 12, 24 and 30 s; every 10 s the user is told again. If the critic answers
    after 40 s the start goes on; if it never does, the start ends after 300 s with `critic.Info: ...`.
    """

    def __init__(
        self,
        timeout_s: float,
        longest_try_s: float,
        note: Callable[[str], None],
        setting: str = "orchestrator.timeouts.start_s",
    ) -> None:
        """
        Args:
            timeout_s: seconds from now to the deadline.
            longest_try_s: the most seconds that one try gets.
            note: called with messages for the user.
            setting: name under which the user sets `timeout_s`.
        """
        self._deadline = Deadline(timeout_s)
        self._longest_try_s = longest_try_s
        self._note = note
        self._setting = setting
        self._due = self._deadline.now + NOTE_EVERY_S
        """Time of the next note; the first loss brings it forward to now."""
        self._lost = False

    async def __call__(
        self,
        ask: Callable[[float], Awaitable[Answer]],
        while_: Callable[[float], Awaitable[bool]] | None = None,
        *,
        reason: str = "",
    ) -> Answer:
        """The answer of `ask`, which gets the seconds that it may take.

        Args:
            ask: called again after each loss.
            while_: called after each loss with the seconds waited so far; False ends the wait with that loss.
            reason: told while the first try goes on. Empty, for tries that keep to their seconds: nothing is told
                before one has ended and named what it waited for.

        Raises:
            Unavailable: the deadline passed; the message has the reasons of the last try.
            Exception: any other error of `ask`, at once.
        """
        deadline, began = self._deadline, self._deadline.now
        backoff, least_s = Backoff(deadline), min(FIRST_S, self._longest_try_s)
        try_s = least_s
        while True:
            asking = asyncio.ensure_future(ask(max(least_s, min(try_s, deadline.left_s))))
            try:
                while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:
                    self._tell(reason)
                return asking.result()
            except Exception as error:
                if not is_awaited(error) or (while_ and not await while_(deadline.now - began)):
                    raise
                reason = reasons(error)
                if not self._lost:
                    self._lost, self._due = True, deadline.now
                self._tell(reason)
                await backoff.wait(Unavailable(f"{reason}; waited {deadline.timeout_s:g} s ({self._setting})"))
            finally:
                asking.cancel()
            try_s = min(2 * try_s, self._longest_try_s)

    def _tell(self, reason: str) -> None:
        now = self._deadline.now
        if reason and now >= self._due:
            self._due = now + NOTE_EVERY_S
            self._note(f"waiting up to {self._deadline.left_s:.0f} s: {reason}")


def is_awaited(error: BaseException) -> bool:
    """True if every failure is a loss that time may mend; false for bad input, and where another run holds the
    services."""
    return all(isinstance(leaf, RECOVERABLE) and not isinstance(leaf, LeaseLost) for leaf in leaves(error))


async def reached(services: Services, deployment: Deployment, patience: Patience) -> None:
    """Returns when all services accept connections.

    Where nothing runs, the first try ends it, after at most 3 s. A head of this folder that is alive may be replacing
    its proxy, and so may a cluster that RAY_ADDRESS names: then it is waited for.

    Raises:
        Unavailable: a service accepts none, and nothing speaks for its coming back, or the deadline passed.
    """
    config = deployment.orchestrator

    async def coming(waited_s: float) -> bool:
        if os.environ.get("RAY_ADDRESS"):
            return waited_s < HEAD_S  # what runs there cannot be seen from here
        return await serves(running(), waited_s)

    await patience(lambda _: services.reach(config, deployment.path), coming)


async def serves(
    head: Cluster | None,
    waited_s: float,
    describe: Callable[[Cluster], dict[str, Any]] = applications,
) -> bool:
    """True if services of this head may accept connections again, after so many seconds without any."""
    if head is None:
        return False
    try:
        return bool(await asyncio.to_thread(describe, head)) or waited_s < HEAD_S
    except OSError:
        return True  # Serve's controller or the dashboard is silent: the head is alive, and starts either again


def patience_of(deployment: Deployment, note: Callable[[str], None]) -> Patience:
    """A start's patience, by the deadlines of the configuration."""
    timeouts = deployment.orchestrator.timeouts
    return Patience(timeouts.start_s, timeouts.info_s, note)


async def described(services: Services, deployment: Deployment, patience: Patience) -> Infos:
    """The descriptions of all services, as soon as each of them answers. Raises like `reached`."""
    await reached(services, deployment, patience)
    return await patience(services.infos)
