"""The policy learner as Ray actors, and its asynchronous face with a deadline on every call."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray

from orchestrator.config import OrchestratorConfig
from orchestrator.policy import PolicyBatch, PolicyTrainer
from services.common.arrays import Floats, Ints
from services.common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ServiceError
from services.common.rank_group import RankGroup, RanksLost
from services.common.ray_rank import ray_ranks
from services.common.weight_transfer.buckets import checksum

Answer = TypeVar("Answer")

LEAVE_S = 5.0
"""How long the ranks may take to end in order."""


class PolicyError(RuntimeError):
    """A rank of the policy learner died or is stuck, and the others with it; training can go on from a checkpoint."""


class Policy:
    """What the loop needs of the policy learner. Every call raises PolicyError once a rank has died or is stuck."""

    def __init__(self, ranks: RankGroup, config: OrchestratorConfig, share: Callable[[Any], Any] = ray.put) -> None:
        """`share` puts what all ranks get where each can fetch it."""
        self._ranks = ranks
        self._timeouts = config.timeouts
        self._weights = config.weights
        self._checkpoint = config.checkpoint
        self._count = config.policy.ranks
        self._share = share

    @classmethod
    async def start(cls, config: OrchestratorConfig) -> "Policy":
        """Starts one actor for each rank and returns when their models are loaded.

        Raises:
            ResourceExhausted: not within timeouts.start_s, usually because the cluster has not the CPUs or GPUs.
        """
        ranks = ray_ranks("policy", config.policy)
        policy = cls(ranks, config)
        arguments = (config.policy, config.ppo, config.sampling.temperature)
        try:
            await ranks.start(PolicyTrainer, *arguments, timeout_s=config.timeouts.start_s)
        except RanksLost as error:
            raise PolicyError(str(error)) from None
        except DeadlineExceeded as error:
            raise ResourceExhausted(str(error)) from None
        return policy

    async def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """See PolicyTrainer.logprobs."""
        given = self._share(prompts), self._share(responses)
        answer: list[Floats] = await self._told(
            self._ranks.call("logprobs", *given, timeout_s=self._timeouts.train_s)
        )
        return answer

    async def train(self, batch: PolicyBatch, seed: int) -> dict[str, float]:
        """See PolicyTrainer.train."""
        call = self._ranks.call("train", self._share(batch), seed, timeout_s=self._timeouts.train_s)
        metrics: dict[str, float] = await self._told(call)
        return metrics

    async def rendezvous(self, backend: str) -> list[int]:
        """The port of each sending rank. See PolicyTrainer.rendezvous."""
        weights = self._weights
        return await self._senders(
            "rendezvous",
            backend,
            host=weights.host,
            bucket_bytes=weights.bucket_mib << 20,
            stall_s=weights.stall_s,
            senders=weights.senders,
            timeout_s=weights.timeout_s,
        )

    async def join(self, epoch: int, world_size: int) -> bytes:
        """See PolicyTrainer.join."""
        manifests = await self._beside("join", epoch, world_size, timeout_s=self._weights.stall_s + 5)
        return bytes(manifests[0])

    async def gather(self, push: int) -> None:
        """See PolicyTrainer.gather."""
        await self._told(self._ranks.call("gather", push, timeout_s=self._weights.timeout_s))

    async def send(self, push: int) -> str:
        """The checksum of what was sent. See PolicyTrainer.send."""
        sent = await self._beside("send", push, timeout_s=self._weights.timeout_s + 1)
        return checksum({number: digest for digests in sent for number, digest in digests.items()})

    async def admit(self, epoch: int, world_size: int) -> None:
        """See PolicyTrainer.admit."""
        await self._beside("admit", epoch, world_size, timeout_s=self._weights.timeout_s)

    async def take_snapshot(self, folder: str, step: int, copies: bool) -> None:
        """See PolicyTrainer.take_snapshot."""
        await self._told(
            self._ranks.call("take_snapshot", folder, step, copies, timeout_s=self._checkpoint.timeout_s)
        )

    async def write_snapshot(self) -> None:
        """See PolicyTrainer.write_snapshot."""
        await self._told(self._ranks.beside(self._count, "write_snapshot", timeout_s=self._checkpoint.timeout_s))

    async def restore(self, folder: str) -> None:
        """See PolicyTrainer.restore."""
        try:
            await self._told(self._ranks.call("restore", folder, timeout_s=self._checkpoint.timeout_s))
        except InvalidArgument as error:
            raise InvalidArgument(f"orchestrator.policy: {error}") from None

    async def save(self, folder: str) -> str:
        """See PolicyTrainer.save."""
        return str(await self._told(self._ranks.call("save", folder, timeout_s=self._timeouts.train_s)))

    async def close(self) -> None:
        """Ends the actors, in order where they still answer."""
        with contextlib.suppress(PolicyError, ServiceError):
            await self._beside("leave", timeout_s=LEAVE_S)
        self.stop()

    def stop(self) -> None:
        """Ends the actors."""
        self._ranks.stop()

    async def _senders(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> list[Any]:
        call = self._ranks.some(self._weights.senders, method, *arguments, timeout_s=timeout_s, **options)
        return await self._told(call)

    async def _beside(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """On the sending ranks, while all of them may be doing something else."""
        return await self._told(self._ranks.beside(self._weights.senders, method, *arguments, timeout_s=timeout_s))

    async def _told(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except (RanksLost, DeadlineExceeded) as error:
            try:
                self._ranks.check()
            except RanksLost:
                raise PolicyError(str(error)) from None
            raise
