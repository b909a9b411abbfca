"""The parts that every deployment of the reward service has which takes calls: gRPC, HTTP and metrics."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from grpc_health.v1 import health_pb2
from prometheus_client.metrics_core import Metric
from ray import serve
from starlette.requests import Request
from starlette.types import ASGIApp

from protos import common_pb2
from protos import reward_pb2 as pb
from quartet.security.port import Port
from quartet.serving.health import HealthMixin
from quartet.serving.http import HttpMixin, refusal
from quartet.serving.replicas import answers_in_time, everyone
from quartet.serving.servicer import translated
from quartet.serving.share import Share
from quartet.wire.errors import InvalidArgument
from quartet.wire.http_errors import HttpError
from services.reward.encoding import Received
from services.reward.http import Door
from services.reward.metrics import Metrics, text_of
from services.reward.names import Listed

GRPC = "grpc"
"""Name of gRPC among the doors."""
METRICS_S = 2.0
"""Seconds that each replica gets to give its metrics."""


class Doors(HealthMixin, HttpMixin):
    """Takes calls over gRPC and HTTP, which a subclass answers by `scored`, `infos` and `token_ids`."""

    def _open(self) -> None:
        """Opens the doors. Each constructor calls it."""
        self._metrics = Metrics()
        self._door = Door(self) if Port.of().http else None
        self._everyone = everyone() if self._door else None

    @abstractmethod
    async def scored(self, request: pb.ScoreRequest, share: Share) -> pb.ScoreResponse:
        """The answer to a request of Score, of a caller of this share."""

    @abstractmethod
    async def infos(self) -> pb.RewardInfo:
        """The answer to a request of Info."""

    @abstractmethod
    async def token_ids(self, scorer: str, text: str, special: bool, share: Share) -> tuple[Sequence[int], int]:
        """The ids of a text by a scorer's tokenizer, with its special tokens or without, and the most that a pair may
        have; for a caller of this share. Raises ServiceError."""

    @abstractmethod
    def label(self, scorer: str) -> str:
        """The name of a scorer among the metrics; one of a few, whatever a request names."""

    @abstractmethod
    def listed(self) -> Mapping[str, Listed]:
        """The scorers, by the names that HTTP requests choose them by. Asks none of them."""

    async def works(self, scorer: str) -> bool:
        """True if the scorer that is named works, or any of them if none is."""
        answer = await self.Check(health_pb2.HealthCheckRequest(service=f"/{scorer}"))  # of whatever application
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @translated
    async def Score(self, request: pb.ScoreRequest, share: Share) -> pb.ScoreResponse:
        """Scores pairs given as ids, texts or conversations, by the scorer that the request names."""
        return await self.score(request, share, GRPC)

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.RewardInfo:
        """Describes the scorers and their tokenizers."""
        return await self.infos()

    async def answer(self, request: Request) -> ASGIApp:
        """Answers a request over HTTP, which Serve's proxy passes on only where the port is open."""
        return self._door or refusal(HttpError(503, "this replica was started before the HTTP port was opened"))

    async def score(self, request: pb.ScoreRequest, share: Share, door: str) -> pb.ScoreResponse:
        """The answer to a request that came by this door, measured."""
        try:
            rows = Received(request).rows
        except InvalidArgument:
            rows = 0  # said by the scorer, to the caller
        with self._metrics.call(self.label(request.scorer), door, rows) as answered:
            response = await self.scored(request, share)
            answered(response)
        return response

    async def taken(self) -> tuple[str, list[Metric]]:
        """This replica's name and its metrics."""
        return str(serve.get_replica_context().replica_tag), self._metrics.taken()

    async def metrics(self) -> bytes:
        """Metrics of all replicas that answer, in Prometheus' text format."""
        found = dict([await self.taken(), *await answers_in_time(self._everyone, "taken", METRICS_S)])
        return text_of(sorted(found.items()))
