"""A check that a run repeats while it goes on: whether its services are still what they were."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from orchestrator.clients import Services
from orchestrator.loop.identities import PartIdentity, changes, identities
from services.common.config.base import ConfigError
from services.common.wire.errors import ServiceError, leaves

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


def watching_services(services: Services, began: Mapping[str, PartIdentity]) -> AbstractAsyncContextManager[None]:
    """Checks while it is open that the services are what they were when the run began."""
    return repeating(lambda: check_unchanged(services, began), SERVICES_S)


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
