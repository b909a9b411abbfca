"""How a new replica comes to the weights of a training run before Serve sends it any request."""

import asyncio
import logging
from typing import Any

import ray

from protos import rollout_pb2 as pb
from services.common.errors import Unavailable
from services.common.weight_transfer.registry import NAMESPACE, Admission, registry_name
from services.rollout.interface import Engine
from services.rollout.weights import WeightMember

log = logging.getLogger("quartet")

APPLY_S = 30
"""One wait for an answer; then the application is renewed, in case it was lost."""


async def catch_up(member: WeightMember, engine: Engine, replica: str, application: str, timeout_s: float) -> None:
    """Returns when the engine holds the version that the other replicas serve; at once when nobody trains.

    Raises:
        Unavailable: a run goes on, but its learner did not get the weights here within `timeout_s`.
    """
    reason = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while (registry := await asyncio.to_thread(_find, application)) is not None:
                try:
                    async with asyncio.timeout(APPLY_S):
                        admission = await registry.apply.remote(replica, engine.workers)
                except TimeoutError:
                    continue
                except ray.exceptions.RayActorError:
                    await asyncio.sleep(0.5)  # the run has ended, or is just ending
                    continue
                if admission is None:
                    return
                reason = await _receive(member, admission)
                if not reason:
                    log.info("%s joined at version %d", replica, engine.version)
                    return
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise Unavailable(
            f"{replica} got no weights from the run that trains {application} in {timeout_s:g} s: {reason}"
        ) from None


def _find(application: str) -> Any:
    try:
        return ray.get_actor(registry_name(application), namespace=NAMESPACE)
    except ValueError:
        return None


async def _receive(member: WeightMember, admission: Admission) -> str:
    """Goes through a push of its own; why it failed, empty if it did not."""
    phases = (
        {"prepare": pb.Prepare.FromString(admission.prepare)},
        {"transfer": pb.Transfer.FromString(admission.transfer)},
        {"commit": pb.Commit.FromString(admission.commit)},
    )
    for phase in phases:
        report = await member.carry_out(pb.WeightPhase(timeout_s=admission.timeout_s, **phase))  # type: ignore[arg-type]
        if not report.ok:
            return str(report.error)
        if "transfer" in phase and report.checksum != admission.checksum:
            await member.carry_out(pb.WeightPhase(timeout_s=admission.timeout_s, abort=pb.Abort()))
            return f"received {report.checksum} where {admission.checksum} was sent"
    return ""
