"""Ends processes of a run and of its services that a signal has stopped.

Such a process keeps its connections open and never answers. Ray waits for it without end; Serve's health checks miss
it after 6 s at best, and look at no replica before its constructor has returned.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import psutil

from orchestrator.deployment import processes
from orchestrator.deployment.cluster import Cluster, running
from quartet.ranks.rank import Rank
from quartet.ranks.stopped import stopped_again
from quartet.threads import in_thread
from quartet.weight_transfer.registry import Registry

log = logging.getLogger("quartet")

KINDS = (rf"\w*{Rank.__name__}", Registry.__name__, r"ServeReplica:\S*", "ProxyActor", "ServeController")
"""Actors that are started again when they end, by the run, by a replica, by Serve or by Ray. Ray's own processes are
not: a cluster ends with them. Nor are the processes below a replica, which looks after them itself."""
_TITLE = re.compile(rf"ray::(?:\S*:)?(?:{'|'.join(KINDS)})(?:\.\w+)?(?:\s|$)")
"""Beginning of the title that Ray gives an actor's process. An actor that has a name, and is being made, has it in
front."""
LOOK_S = 1.0
"""Seconds between two looks at the processes of this machine."""
LOOKS = 3
"""Looks in a row that find a process stopped before it is ended."""


@asynccontextmanager
async def ending_halted(head: Callable[[], Cluster | None] = running) -> AsyncIterator[None]:
    """Ends stopped processes of the head while this is open; those that a debugger holds are not stopped. Others of
    this machine are left alone, and so is a cluster of one's own, whose processes are not known."""
    watching = asyncio.ensure_future(_watch(head))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def _watch(head: Callable[[], Cluster | None]) -> None:
    seen: Mapping[psutil.Process, int] = {}
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            seen = await in_thread(partial(_look, seen, head), "looks for stopped processes")
        except Exception as error:  # a record or a process that cannot be read now may be read at the next look
            log.warning("stopped processes could not be looked for: %s", error)


def _look(before: Mapping[psutil.Process, int], head: Callable[[], Cluster | None]) -> Mapping[psutil.Process, int]:
    """Ends what LOOKS looks in a row have found stopped; the others that are stopped, with the number of looks."""
    seen = stopped_again(before, psutil.process_iter())
    # The processes of a head are found by their environment, which is read only when something is stopped.
    cluster = head() if any(looks == LOOKS for looks in seen.values()) else None
    for pid, title in processes.stopped(cluster.processes()).items() if cluster else ():
        process = next((one for one, looks in seen.items() if one.pid == pid and looks >= LOOKS), None)
        if process and _TITLE.match(title):
            log.warning(
                "a signal has stopped %s, process %d: it is ended, and another takes its place", title.strip(), pid
            )
            with contextlib.suppress(psutil.Error):
                process.kill()
    return seen
