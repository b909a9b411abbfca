"""Fetches the weights of the current training run into a new replica before Serve sends it requests."""

import asyncio
import logging

import ray

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.probe import scores_of
from quartet.weight_transfer.registry import (
    NAME_ERRORS,
    NAMESPACE,
    Answer,
    Applicant,
    Ticket,
    registries,
    registry_name,
)
from quartet.wire.codec import pack_sequences
from quartet.wire.errors import Unavailable
from services.rollout.interface import Engine
from services.rollout.member import WeightMember

log = logging.getLogger("quartet")

APPLY_S = 30
"""Longest wait for an answer, in seconds; then the replica applies again, in case its application was lost."""


async def catch_up(member: WeightMember, engine: Engine, replica: str, application: str, timeout_s: float) -> None:
    """Returns when the engine holds the version that the other replicas serve; at once if no run is active.

    Raises:
        Unavailable: a run is active, but its learner did not deliver the weights within `timeout_s`, or the engine
            died meanwhile.
    """
    reason = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if not (numbers := await asyncio.to_thread(registries, application)):
                        return
                    name = registry_name(application, numbers[-1])
                    registry = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
                    async with asyncio.timeout(APPLY_S):
                        applicant = Applicant(engine.workers, engine.place, ray.get_runtime_context().current_actor)
                        answer = await registry.apply.remote(replica, applicant)
                        lease = await _claim(member, answer)
                except (TimeoutError, ray.exceptions.RayActorError, *NAME_ERRORS):
                    # Ray is busy, or the run has ended or is about to, or has opened another.
                    await asyncio.sleep(0.5)
                    continue
                if answer.ticket is None:
                    return
                reason = await _receive(member, answer.ticket, lease)
                if not reason:
                    log.info("%s joined at version %d", replica, engine.version)
                    return
                await _check_alive(engine, replica, reason)
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise Unavailable(
            f"{replica} got no weights from the run that trains {application} in {timeout_s:g} s: {reason}"
        ) from None


async def _check_alive(engine: Engine, replica: str, reason: str) -> None:
    """Raises Unavailable if the engine is dead, with which no application would succeed: the run would wait each time
    for a member that does not come, and its own pushes with it. One that does not answer may be busy still."""
    try:
        await engine.check_health()
    except TimeoutError:
        pass
    except Exception as error:
        raise Unavailable(f"{replica} cannot join, as its engine is dead ({error}): {reason}") from None


async def _claim(member: WeightMember, answer: Answer) -> common_pb2.Lease:
    """Puts the run's lease in force here and returns it."""
    lease = common_pb2.Lease.FromString(answer.lease)
    claim = common_pb2.Claim(ttl_s=answer.ttl_s, take_over=True)
    phase = pb.WeightPhase(timeout_s=APPLY_S, lease=lease, claim=claim)
    report = await member.carry_out(phase)
    if not report.ok:
        raise Unavailable(report.error)
    return lease


async def _receive(member: WeightMember, ticket: Ticket, lease: common_pb2.Lease) -> str:
    """Carries out a push for this replica alone; returns the reason of a failure, empty on success."""
    phases = (
        {"prepare": pb.Prepare.FromString(ticket.prepare)},
        {"transfer": pb.Transfer.FromString(ticket.transfer)},
        {"commit": pb.Commit.FromString(ticket.commit)},
    )
    for phase in phases:
        asked = pb.WeightPhase(timeout_s=ticket.timeout_s, lease=lease, **phase)  # type: ignore[arg-type]
        report = await member.carry_out(asked)
        if not report.ok:
            return str(report.error)
        if "transfer" in phase and report.checksum != ticket.checksum:
            abort = pb.WeightPhase(timeout_s=ticket.timeout_s, lease=lease, abort=pb.Abort())
            await member.carry_out(abort)
            return f"received {report.checksum} where {ticket.checksum} was sent"
    return await _prove(member, ticket, lease) if ticket.probe else ""


async def _prove(member: WeightMember, ticket: Ticket, lease: common_pb2.Lease) -> str:
    """Compares the engine's log-probs with the learner's; returns the disagreement, empty if there is none."""
    assert ticket.probe is not None
    sequences = ticket.probe.sequences
    asked = pb.Probe(sequences=pack_sequences(sequences))
    report = await member.carry_out(pb.WeightPhase(timeout_s=ticket.timeout_s, lease=lease, probe=asked))
    if not report.ok:
        return str(report.error)
    return ticket.probe.disagreement(scores_of(report, sequences), list(report.stale))
