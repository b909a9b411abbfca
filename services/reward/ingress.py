"""The deployment that takes the calls where an application has several scorers, each a deployment of its own."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from grpc_health.v1 import health_pb2
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from protos import reward_pb2 as pb
from quartet.serving.admission import MOST_ONGOING
from quartet.serving.replica_process import prepare_replica
from quartet.serving.share import Share
from quartet.wire.errors import REPLICA_DIED, ServiceError, Unavailable
from services.reward.config import INGRESS
from services.reward.doors import Doors
from services.reward.names import chosen

ANSWER_S = 2.0
"""Seconds that a scorer gets to describe itself, after which its last description counts; one that hangs holds up no
caller of the others."""
HEALTH_S = 10.0
"""Seconds that it gets to answer for its health."""


@serve.deployment(
    name=INGRESS,
    max_ongoing_requests=MOST_ONGOING,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class Ingress(Doors):
    """Passes each request on to the scorer that it names. Limits, queues and health are each scorer's own."""

    def __init__(self, scorers: Mapping[str, Any]) -> None:
        """Takes Serve's handles of the scorers, by name."""
        prepare_replica()
        self._scorers = dict(scorers)
        self._known = {name: pb.ScorerInfo(name=name) for name in scorers}
        self._open()

    async def check_health(self) -> None:
        """Does nothing, as a scorer that fails is replaced by itself."""

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """SERVING if one of the scorers is."""
        asked = [asyncio.ensure_future(self._serves(name, request)) for name in self._scorers]
        status = health_pb2.HealthCheckResponse.NOT_SERVING
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    status = health_pb2.HealthCheckResponse.SERVING
                    break
        finally:
            for task in asked:
                task.cancel()
        return health_pb2.HealthCheckResponse(status=status)

    async def _serves(self, name: str, request: health_pb2.HealthCheckRequest) -> bool:
        with suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(HEALTH_S):
                answer = await self._ask(name, "Check", request)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    async def scored(self, request: pb.ScoreRequest, share: Share) -> pb.ScoreResponse:
        """The answer to a request of Score, of a caller of this share."""
        response: pb.ScoreResponse = await self._ask(chosen(request.scorer, self._scorers), "scored", request, share)
        return response

    async def infos(self) -> pb.RewardInfo:
        """The answer to a request of Info: each scorer as it describes itself, as it did last if it does not answer,
        or by its name alone if it never did."""

        async def describe(name: str) -> None:
            with suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    [self._known[name]] = (await self._ask(name, "infos")).scorers

        await asyncio.gather(*map(describe, self._scorers))
        return pb.RewardInfo(scorers=self._known.values())

    async def token_ids(self, scorer: str, text: str, special: bool) -> Sequence[int]:
        """The ids of a text by the tokenizer of the scorer that is named."""
        name = chosen(scorer, self._scorers)
        async with asyncio.timeout(ANSWER_S):
            ids: Sequence[int] = await self._ask(name, "token_ids", name, text, special)
        return ids

    def label(self, scorer: str) -> str:
        """The name, if a scorer has it."""
        return scorer if scorer in self._scorers else ""

    async def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        """A scorer's answer. Raises the error that it raised; Unavailable if its replica is lost."""
        try:
            return await getattr(self._scorers[name], method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, RayServeException):
            raise Unavailable(f"scorer {name}: {REPLICA_DIED}") from None
