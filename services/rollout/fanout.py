"""Calls to every replica of a deployment that do not wait for replicas without an answer."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from protos import rollout_pb2 as pb
from quartet.seams.serve import answers_of_each
from quartet.wire.errors import Unavailable

GRACE_S = 2.0
"""Seconds that the other members get once it is certain that one is lost, since they fail only when their collectives
break."""
OTHERS_S = 1.0
"""Seconds that replicas get which are not members, once all members have answered a phase that decides who takes part
in the next: one that stands still would otherwise hold every push up until Serve replaces it."""
_DECIDING = ("discover", "abort")


async def broadcast(handle: Any, phase: pb.WeightPhase) -> list[pb.WeightReport]:
    """Makes every replica that Serve knows carry out a phase; returns the reports of those that answered.

    Raises:
        Unavailable: Serve does not know the replicas.
        TimeoutError: it does not name them within the phase's time.
    """
    try:
        response = handle.broadcast("carry_out", phase.SerializeToString())
        async with asyncio.timeout(phase.timeout_s):
            answers = await answers_of_each(response)
    except (RayServeException, RayError) as error:
        # As when Serve's controller is being replaced, and knows no replicas for a moment.
        raise Unavailable(f"Serve names no rollout replicas: {type(error).__name__}") from None
    return await reports_of(phase, answers)


async def reports_of(phase: pb.WeightPhase, answers: Collection[Awaitable[bytes]]) -> list[pb.WeightReport]:
    """The reports on a phase from `answers`, one for each replica, within the phase's deadline."""
    others_s = OTHERS_S if phase.WhichOneof("phase") in _DECIDING else 0.0
    # A second more than the replicas' own deadline, so that the report of a slow replica arrives.
    return await gathered(answers, phase.members, phase.timeout_s + 1, others_s=others_s)


async def gathered(
    answers: Collection[Awaitable[bytes]],
    members: Collection[str],
    timeout_s: float,
    grace_s: float = GRACE_S,
    *,
    others_s: float = 0.0,
) -> list[pb.WeightReport]:
    """The reports that have come when all members have answered or no further report can come.

    Args:
        answers: one for each replica, members or not.
        members: the replicas to wait for; empty for all.
        timeout_s: the longest wait in seconds.
        grace_s: the longest wait in seconds once a member is lost.
        others_s: the longest wait in seconds for the others once all members have answered.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    waiting: set[asyncio.Future[bytes]] = {asyncio.ensure_future(answer) for answer in answers}
    reports: list[pb.WeightReport] = []
    try:
        while waiting and clock() < end:
            missing = set(members) - {report.replica for report in reports}
            if members and not missing:
                if not others_s:
                    break
                end = min(end, clock() + others_s)
            # An error does not name its replica. A dead replica that is not a member does not shorten the members'
            # time; a member that Serve is stopping, and no longer calls, counts as missing from the beginning.
            failed = len(waiting) + len(reports) < len(answers)
            if len(waiting) < len(missing) or (failed and not members):
                end = min(end, clock() + grace_s)
            done, waiting = await asyncio.wait(waiting, timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)
            reports += [pb.WeightReport.FromString(answer.result()) for answer in done if not answer.exception()]
    finally:
        for answer in waiting:
            answer.cancel()
    return reports
