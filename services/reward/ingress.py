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
from quartet.serving.health import HEALTH_S, health_reply
from quartet.serving.replica_process import prepare_replica
from quartet.serving.replicas import connected
from quartet.serving.share import Share
from quartet.wire.errors import REPLICA_DIED, ServiceError, Unavailable
from services.reward.config import INGRESS
from services.reward.doors import Doors
from services.reward.names import Listed, chosen

ANSWER_S = 2.0
"""Seconds that a scorer gets to describe itself, after which its last description counts; one that hangs holds up no
caller of the others."""
TOKENS_S = 10.0
"""Seconds that it gets to tokenise a text, after those that came before it."""


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

    def __init__(self, scorers: Mapping[str, Any], scores: Mapping[str, Sequence[str]]) -> None:
        """Takes Serve's handles of the scorers, and the names of their scores, by the scorers' names."""
        prepare_replica()
        self._scorers = {name: connected(handle) for name, handle in scorers.items()}
        self._listed = {name: Listed(name, tuple(scores[name])) for name in scorers}
        self._known = {name: pb.ScorerInfo(name=name) for name in scorers}
        self._open()

    async def check_health(self) -> None:
        """Does nothing, as a scorer that fails is replaced by itself."""

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """SERVING if one of the scorers is; or if the one is that stands behind the application, `reward/taste`."""
        if named := request.service.partition("/")[2]:
            return health_reply(named in self._scorers and await self._serves(named, request))
        asked = [asyncio.ensure_future(self._serves(name, request)) for name in self._scorers]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return health_reply(True)
            return health_reply(False)
        finally:
            for task in asked:
                task.cancel()

    async def _serves(self, name: str, request: health_pb2.HealthCheckRequest) -> bool:
        with suppress(ServiceError):
            answer = await self._ask(name, "Check", request, within_s=HEALTH_S)
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
            with suppress(ServiceError):
                [self._known[name]] = (await self._ask(name, "infos", within_s=ANSWER_S)).scorers

        await asyncio.gather(*map(describe, self._scorers))
        return pb.RewardInfo(scorers=self._known.values())

    async def token_ids(self, scorer: str, text: str, special: bool, share: Share) -> tuple[Sequence[int], int]:
        """The ids of a text by the tokenizer of the scorer that is named, and the most that a pair may have."""
        name = chosen(scorer, self._scorers)
        answer: tuple[Sequence[int], int] = await self._ask(
            name, "token_ids", name, text, special, share, within_s=TOKENS_S
        )
        return answer

    def label(self, scorer: str) -> str:
        """The name, if a scorer has it."""
        return scorer if scorer in self._scorers else ""

    def listed(self) -> Mapping[str, Listed]:
        """The scorers by their names."""
        return self._listed

    async def _ask(self, name: str, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """A scorer's answer; its work for it ends with this call. Raises the error that it raised; Unavailable if its
        replica is lost, or it has not answered within so many seconds."""
        response = getattr(self._scorers[name], method).remote(*arguments)
        try:
            async with asyncio.timeout(within_s):
                try:
                    return await response
                except asyncio.CancelledError:
                    response.cancel()  # a response whose await is cancelled goes on
                    raise
        except RayTaskError as error:
            raise error.cause from None
        except TimeoutError:
            raise Unavailable(f"scorer {name}: no answer within {within_s:g} s") from None
        except (RayError, RayServeException):
            raise Unavailable(f"scorer {name}: {REPLICA_DIED}") from None
