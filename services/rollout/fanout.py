"""Asking every replica of a deployment, without waiting for those that do not answer."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any

from protos import rollout_pb2 as pb

GRACE_S = 2.0
"""After one replica is lost: how long the others may take. They wait for it in collectives that now break."""


async def broadcast(handle: Any, method: str, phase: pb.WeightPhase) -> list[pb.WeightReport]:
    """Has every replica that Serve knows carry out a phase; the reports of those that answered.

    Serve's own gathering of a broadcast's results loses all of them when one is late, hence the private call.
    """
    response = handle.broadcast(method, phase.SerializeToString())
    async with asyncio.timeout(phase.timeout_s):
        results = await response._fetch_replica_results_async()
    # A second beyond the replicas' own deadline: a slow replica's report says more than its absence.
    return await gathered([result.get_async() for result in results], phase.members, phase.timeout_s + 1)


async def gathered(
    answers: Collection[Awaitable[bytes]], members: Collection[str], timeout_s: float
) -> list[pb.WeightReport]:
    """The reports that have come when all members have answered, or no more are to be expected.

    Args:
        answers: one for each replica, members or not.
        members: whose reports count; empty for everyone's.
        timeout_s: the longest wait.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    waiting: set[asyncio.Future[bytes]] = {asyncio.ensure_future(answer) for answer in answers}
    reports: list[pb.WeightReport] = []
    try:
        while waiting and clock() < end and not _complete(reports, members):
            done, waiting = await asyncio.wait(waiting, timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)
            for answer in done:
                if answer.exception() is None:
                    reports.append(pb.WeightReport.FromString(answer.result()))
                else:
                    end = min(end, clock() + GRACE_S)
    finally:
        for answer in waiting:
            answer.cancel()
    return reports


def _complete(reports: Collection[pb.WeightReport], members: Collection[str]) -> bool:
    return bool(members) and {report.replica for report in reports} >= set(members)
