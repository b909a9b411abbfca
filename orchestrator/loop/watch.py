"""Checks that a run repeats while it goes on: the ports of its processes, and the identities of its services."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil

from orchestrator.clients import Services
from orchestrator.deployment.cluster import running
from orchestrator.deployment.listeners import Watch
from orchestrator.loop.identities import PartIdentity, changes, identities
from services.common.config.base import ConfigError
from services.common.wire.errors import ServiceError, leaves

PORTS_S = 30.0
"""Seconds between two checks of the ports."""
SERVICES_S = 10.0
"""Seconds between two checks of the services."""
ANSWER_S = 10.0
"""Longest wait for their answers."""


@asynccontextmanager
async def repeating(check: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Makes a check at the beginning and then every `every_s` seconds while this is open.

    Raises:
        Whatever the check raises: at once, or in the block as a cancellation and at its end as an error.
    """
    await check()

    async def repeat() -> None:
        while True:
            await asyncio.sleep(every_s)
            await check()

    async with asyncio.TaskGroup() as group:
        repeated = group.create_task(repeat())
        yield
        repeated.cancel()


def watching_ports() -> AbstractAsyncContextManager[None]:
    """Checks the ports of this run's processes while it is open."""
    return repeating(ports_of_run(), PORTS_S)


def watching_services(services: Services, began: Mapping[str, PartIdentity]) -> AbstractAsyncContextManager[None]:
    """Checks while it is open that the services are what they were when the run began."""
    return repeating(lambda: check_unchanged(services, began), SERVICES_S)


def ports_of_run() -> Callable[[], Awaitable[None]]:
    """A check that all ports of this run refuse callers from other machines. See Watch.look.

    On a cluster that `quartet up` did not start, whose ports are its owner's business, it checks nothing.
    """
    head = None if os.environ.get("RAY_ADDRESS") else running()

    def processes() -> list[psutil.Process]:
        own = psutil.Process()
        return [] if head is None else [*head.processes(), own, *own.children(recursive=True)]

    return Watch(processes).look


async def check_unchanged(services: Services, began: Mapping[str, PartIdentity]) -> None:
    """Returns if the services are what they were when the run began, or do not say.

    Raises:
        ConfigError: one has another model, tokenizer or scorer; says which and what to do.
    """
    try:
        infos = await services.infos(ANSWER_S)
    except ExceptionGroup as failed:
        if all(isinstance(leaf, ServiceError) for leaf in leaves(failed)):
            return  # the loop finds out, and waits for it
        raise
    changed = changes(began, identities(infos), "when the run began")
    if changed:
        raise ConfigError(
            "\n".join(changed) + "\nthe run ends here, as its samples would no longer be comparable: deploy the "
            "services as they were and `quartet train --resume`, or go on with the new ones by "
            "--resume --accept-changed-services"
        )
