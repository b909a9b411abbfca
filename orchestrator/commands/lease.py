"""A run's hold on its services: a lease that is claimed before anything is changed, again when the run goes back to
a checkpoint, renewed while the run is alive, and then released."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from orchestrator.clients import Services
from orchestrator.commands.patience import Patience
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.wire.errors import LeaseLost, ServiceError

log = logging.getLogger("quartet")

CALL_S = 10.0
"""Longest wait, in seconds, for an answer to a renewal."""
LOOK_S = 1.0
"""Seconds between looks of a run that waits for another's end."""
RENEWALS = 3
"""Renewals within the time for which a lease is claimed."""


class Hold:
    """The lease that a run holds now. Its number is the run's timeline."""

    def __init__(self, services: Services, lease: common_pb2.Lease, ttl_s: float) -> None:
        self._services = services
        self._ttl_s = ttl_s
        # A renewal that came after a later claim would be refused as another run's.
        self._turn = asyncio.Lock()
        self.lease = lease
        """The lease that was claimed last."""

    async def begin_timeline(self, patience: Patience) -> None:
        """Claims the services under a higher number, for a run that goes back to a checkpoint: what they made since
        then, and what is still under way to them, is of an abandoned timeline from here on.

        A rollout replica that does not take the claim takes no part in pushes until a renewal reaches it.

        Raises:
            LeaseLost: another run has taken over.
            ServiceError: the critic, or every rollout replica, did not take the claim within `patience`.
        """
        async with self._turn:
            self.lease = common_pb2.Lease(run_id=self.lease.run_id, number=self.lease.number + 1)

            async def claim(try_s: float) -> None:
                try:
                    await _on_all(self._services, self.lease, self._ttl_s, take_over=True, timeout_s=try_s)
                except LeaseLost:
                    raise
                except ServiceError as error:
                    if self._services.rollout.lease.number != self.lease.number:
                        raise
                    log.warning("lease: renewals reach the others: %s", error)

            await patience(claim)

    async def renew(self) -> None:
        """Renews the lease until cancelled or until it is lost."""
        while True:
            await asyncio.sleep(self._ttl_s / RENEWALS)
            async with self._turn:
                for service in self._services.leased:
                    try:
                        # Takes over, because a replica that was silent at the claim may still hold an older lease.
                        await service.claim(self.lease, self._ttl_s, CALL_S, take_over=True)
                    except LeaseLost:
                        raise
                    except ServiceError as error:
                        # A replica may be just being replaced; the loop notices that and waits for it.
                        log.warning("lease: not renewed: %s", error)


@asynccontextmanager
async def holding(
    services: Services,
    run_id: str,
    patience: Patience,
    *,
    ttl_s: float,
    take_over: bool,
    note: Callable[[str], None],
) -> AsyncIterator[Hold]:
    """Context in which rollout replicas, and a critic, accept only this run's calls.

    If another run may have crashed, waits until it no longer counts as alive.

    Args:
        services: their clients will carry the lease.
        run_id: id of this run, the same whenever it is resumed.
        patience: waits for services that are being replaced.
        ttl_s: seconds for which the run counts as alive after a renewal.
        take_over: True to claim the services even if another run is alive; that run's next call is refused.
        note: called with messages for the user.

    Raises:
        LeaseLost: another run is alive, or takes over later; that cancels the block and is raised at its end.
        Unavailable: a service does not take the claim within `patience`.
    """
    if not take_over:
        await _others_over(services, run_id, patience, note)
    hold = Hold(services, await _claim(services, run_id, patience, ttl_s, take_over), ttl_s)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(hold.renew())
            yield hold
            renewing.cancel()
    finally:
        with contextlib.suppress(ServiceError, TimeoutError):
            await _on_all(services, hold.lease, 0.0, take_over=False, timeout_s=CALL_S)


async def _others_over(services: Services, run_id: str, patience: Patience, note: Callable[[str], None]) -> None:
    """Returns when no other run counts as alive."""
    left: dict[str, float] = {}
    while True:
        held = await patience(partial(_held, services))
        others: dict[str, float] = {}
        for one in held:  # replicas were renewed at different times: the latest counts, whichever answers first
            if one.left_s > 0 and one.lease.run_id not in ("", run_id):
                others[one.lease.run_id] = max(one.left_s, others.get(one.lease.run_id, 0.0))
        if not others:
            return
        for other, left_s in others.items():
            if left_s > left.get(other, left_s):  # it was renewed since
                raise LeaseLost(
                    f"run {other} is training with these services: stop it first, use other services, or take "
                    "over from it with --take-over"
                )
            if other not in left:
                note(f"waiting up to {left_s:.0f} s: run {other} was alive a moment ago")
        left = others
        await asyncio.sleep(LOOK_S)


async def training(services: Services) -> str:
    """Id of the run that counts as alive and holds the services; empty if none does, or if they do not answer."""
    try:
        held = await _held(services, CALL_S)
    except ServiceError:
        return ""
    return max(held, key=lambda one: one.left_s).lease.run_id if any(one.left_s > 0 for one in held) else ""


async def _claim(
    services: Services, run_id: str, patience: Patience, ttl_s: float, take_over: bool
) -> common_pb2.Lease:
    newest = max((held.lease.number for held in await patience(partial(_held, services))), default=0)
    lease = common_pb2.Lease(run_id=run_id, number=newest + 1)
    try:
        # Repeated under the same number: what has taken the claim takes it again as a renewal.
        await patience(lambda try_s: _on_all(services, lease, ttl_s, take_over, try_s))
    except BaseException:
        with contextlib.suppress(ServiceError):
            await services.leased[0].claim(lease, 0.0, CALL_S)
        raise
    return lease


async def _on_all(
    services: Services, lease: common_pb2.Lease, ttl_s: float, take_over: bool, timeout_s: float
) -> None:
    for service in services.leased:
        await service.claim(lease, ttl_s, timeout_s, take_over=take_over)


async def _held(services: Services, timeout_s: float) -> Sequence[common_pb2.Held]:
    critic = [(await services.critic.info(timeout_s)).held] if services.critic else []
    reports = await services.rollout.update_weights(timeout_s, discover=pb.Discover())
    return [*critic, *(report.held for report in reports)]
