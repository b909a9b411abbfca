"""Checks that a run repeats while it goes on: whether its services are still what they were, and whether its
certificates end soon."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from orchestrator.clients import Services
from orchestrator.loop.identities import PartIdentity, changes, identities
from quartet.config.base import ConfigError
from quartet.security.credentials import Life, life
from quartet.wire.errors import ServiceError, leaves

CERTIFICATES_S = 1800.0
"""Seconds between two checks of the certificates."""
LITTLE = 0.1
"""Part of a certificate's life that is left when the user is first told; again whenever half of that is left."""
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


def watching_certificates(targets: Collection[str], note: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
    """Tells the user while it is open if a certificate that these servers are shown ends soon."""
    told: dict[Path, float] = {}
    return repeating(lambda: tell_endings(targets, note, told), CERTIFICATES_S)


async def tell_endings(
    targets: Collection[str],
    note: Callable[[str], None],
    told: dict[Path, float],
    life_of: Callable[[str], Life | None] = life,
) -> None:
    """Tells the user of each certificate of which less than LITTLE is left. `told` holds the seconds that were left
    when the user was told last."""
    for one in filter(None, map(life_of, targets)):
        if one.left_s >= LITTLE * one.whole_s:
            told.pop(one.certificate, None)  # a new one
        elif one.left_s <= told.get(one.certificate, math.inf) / 2:
            told[one.certificate] = one.left_s if one.left_s > 0 else -math.inf
            when = f"ends in {one.left_s / 3600:.1f} h" if one.left_s > 0 else "has ended"
            note(
                f"{one.certificate} {when}, and services then refuse this run's calls; `quartet keys` makes another, "
                "which the run takes up by itself"
            )


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
