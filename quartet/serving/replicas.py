"""Questions to every replica of a deployment."""

import asyncio
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from quartet.seams.serve import answers_of_each


def connected(handle: Any) -> Any:
    """The handle of a deployment, ready for calls. A constructor calls this: Serve otherwise asks its controller and
    Ray's GCS at the first call, and the replica's event loop stands still for as long as they do."""
    return handle.options()


def everyone() -> Any:
    """A handle of all replicas of the deployment that this process is one of."""
    context = serve.get_replica_context()
    return connected(serve.get_deployment_handle(context.deployment, context.app_name))


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
