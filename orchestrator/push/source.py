"""The learner's part of a push, and the wait for its end and the replicas' together."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from quartet.weight_transfer.place import Place

log = logging.getLogger("quartet")

Left = TypeVar("Left")
Right = TypeVar("Right")

GRACE_S = 1.0
"""Seconds that the other side gets to report its reason after one side failed."""


class WeightSource(Protocol):
    """The learner's part of a push: it forms a group with the replicas and sends."""

    memberships: int
    """Highest number of a membership that any pusher asked this source for; 0 at first. The source's store keeps the
    addresses of each, so that a number is not used again: a member might connect to those who met under it before."""

    async def places(self) -> Sequence[Place]:
        """The place of each sender."""

    async def rendezvous(self, backend: str) -> Sequence[tuple[str, int]]:
        """Opens a backend; returns the addresses and ports at which the members of each of its groups meet, one for
        each sender."""

    async def manifest(self) -> bytes:
        """The packed manifest of the weights."""

    async def join(self, membership: int, world_size: int) -> None:
        """Forms the group."""

    async def gather(self, push: int) -> None:
        """Copies the current weights as those of this push. Runs in turn with the learner's other work, such as
        training; all other methods run beside it."""

    async def send(self, push: int) -> str:
        """Sends the weights of this push; returns the checksum."""

    async def abandon(self, membership: int) -> None:
        """Ends the transfer to this membership, so that no replica waits for another that is gone."""

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends the weights of the last push to a group of newcomers, also while the learner trains."""


async def both(replicas: Awaitable[Left], learner: Awaitable[Right]) -> tuple[Left, Right]:
    """Waits for both sides of a collective, or of a proof. If one fails, the other gets GRACE_S to end and is then
    cancelled. If both fail, the replicas' error is raised, since it tells more, and the learner's is logged."""
    left, right = asyncio.ensure_future(replicas), asyncio.ensure_future(learner)
    sides: list[asyncio.Future[Any]] = [left, right]
    try:
        _, pending = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=GRACE_S)
    finally:
        for side in sides:
            side.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
    if left.cancelled():
        right.result()  # raises the reason
    elif left.exception() and not right.cancelled() and right.exception():
        log.warning("the learner's side: %s", right.exception())
    return left.result(), right.result()
