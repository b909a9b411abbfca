"""Questions to every replica of a deployment."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from quartet.seams.serve import answers_of_each


async def answers_in_time(handle: Any, method: str, seconds: float) -> list[Any]:
    """The results of `method` on the replicas that answer within so many seconds; those that fail are left out.

    Empty if Serve does not name the replicas, as while its controller is being replaced.
    """
    try:
        async with asyncio.timeout(seconds):
            answers = await answers_of_each(handle.broadcast(method))
    except (RayServeException, RayError, TimeoutError):
        return []
    if not answers:
        return []
    done, late = await asyncio.wait(map(asyncio.ensure_future, answers), timeout=seconds)
    for each in late:
        each.cancel()
    return [each.result() for each in done if not each.cancelled() and not each.exception()]
