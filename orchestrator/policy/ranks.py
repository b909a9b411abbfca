"""The policy learner as Ray actors, with asynchronous methods that each have a deadline."""

import contextlib
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar, cast

import ray

from orchestrator.config.run import OrchestratorConfig
from orchestrator.policy.sampled import sampled_from
from orchestrator.policy.sending import WeightSending
from orchestrator.policy.trainer import PolicyBatch, PolicyTrainer
from quartet.learner.learner import Snapshots
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup, RanksLost
from quartet.ranks.ray_rank import ray_ranks
from quartet.weight_transfer.memory.buckets import checksum
from quartet.weight_transfer.place import Place
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ServiceError

Answer = TypeVar("Answer")
Value = TypeVar("Value")

LEAVE_S = 5.0
"""Seconds that the ranks may take to end in order."""


class PolicyError(RuntimeError):
    """A rank of the policy learner died or is stuck, and all ranks have ended; a run can resume from a checkpoint."""


class StoreOnce(Protocol):
    """Stores a value once for all ranks. What it returns stands for the value in a call: each rank fetches it."""

    def __call__(self, value: Value, /) -> Value:
        """Stores the value."""


def in_object_store(value: Value, /) -> Value:
    """Stores a value in Ray's object store; a method of an actor that is called with the reference gets the value."""
    return cast(Value, ray.put(value))


class Policy:
    """The policy learner. Every method raises PolicyError after a rank has died or is stuck."""

    def __init__(self, ranks: RankGroup, config: OrchestratorConfig, share: StoreOnce = in_object_store) -> None:
        self._ranks = ranks
        self._timeouts = config.timeouts
        self._weights = config.weights
        self._checkpoint = config.checkpoint
        self._count = config.policy.ranks
        self._share = share
        self.memberships = 0
        """Highest number of a push group that was asked for, see WeightSource."""

    @classmethod
    async def start(cls, config: OrchestratorConfig, distribution: Distribution | None = None) -> "Policy":
        """Starts one actor for each rank and returns when their models are loaded.

        Args:
            config: the run's configuration.
            distribution: the distribution that responses are sampled from; None: as `sampled_from` reads it.

        Raises:
            ResourceExhausted: it took longer than timeouts.start_s, usually because the cluster lacks CPUs or GPUs.
            PolicyError: a rank died while it started.
        """
        ranks = ray_ranks("policy", config.policy)
        policy = cls(ranks, config)
        arguments = (config.scheduled_policy, config.algorithm, distribution or sampled_from(config))
        try:
            await ranks.start(PolicyTrainer, *arguments, timeout_s=config.timeouts.start_s)
        except RanksLost as error:
            raise PolicyError(str(error)) from None
        except DeadlineExceeded as error:
            raise ResourceExhausted(str(error)) from None
        return policy

    async def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """Log-probs under the current weights, as PolicyTrainer.logprobs."""
        given = self._share(prompts), self._share(responses)
        return await self._told(self._ranks.call(PolicyTrainer.logprobs, self._timeouts.train_s, *given))

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs over the whole vocabulary, as PolicyTrainer.score."""
        call = self._ranks.call(PolicyTrainer.score, self._weights.timeout_s, self._share(sequences))
        return await self._told(call)

    async def train(self, batch: PolicyBatch, seed: int) -> dict[str, float]:
        """Trains on one batch, as PolicyTrainer.train."""
        call = self._ranks.call(PolicyTrainer.train, self._timeouts.train_s, self._share(batch), seed)
        return await self._told(call)

    async def trained_logprobs(self) -> list[Floats]:
        """Log-probs that the last update computed, as PolicyTrainer.trained_logprobs."""
        return await self._told(self._ranks.call(PolicyTrainer.trained_logprobs, self._timeouts.train_s))

    async def places(self) -> list[Place]:
        """The place of each sending rank, see WeightSending.place."""
        weights = self._weights
        return await self._told(self._ranks.some(weights.senders, WeightSending.place, weights.timeout_s))

    async def rendezvous(self, backend: str) -> list[int]:
        """The port of each sending rank, see WeightSending.rendezvous."""
        weights = self._weights
        call = self._ranks.beside(
            weights.senders,
            WeightSending.rendezvous,
            weights.timeout_s,
            backend,
            host=weights.host,
            bucket_bytes=weights.bucket_mib << 20,
            stall_s=weights.stall_s,
            senders=weights.senders,
            on_gpu=weights.stage == "gpu",
        )
        return await self._told(call)

    async def manifest(self) -> bytes:
        """The packed manifest, see WeightSending.manifest."""
        weights = self._weights
        size = weights.bucket_mib << 20
        call = self._ranks.some(weights.senders, WeightSending.manifest, weights.timeout_s, size)
        return (await self._told(call))[0]

    async def join(self, membership: int, world_size: int) -> None:
        """Forms the push group, see WeightSending.join."""
        weights = self._weights
        call = self._ranks.beside(weights.senders, WeightSending.join, weights.stall_s + 5, membership, world_size)
        await self._told(call)

    async def gather(self, push: int) -> None:
        """Takes the weights of this push, see WeightSending.gather."""
        await self._told(self._ranks.call(WeightSending.gather, self._weights.timeout_s, push))

    async def send(self, push: int) -> str:
        """Sends the weights of this push; the checksum. See WeightSending.send."""
        weights = self._weights
        call = self._ranks.beside(weights.senders, WeightSending.send, weights.timeout_s + 1, push)
        return checksum({number: digest for digests in await self._told(call) for number, digest in digests.items()})

    async def abandon(self, membership: int) -> None:
        """Ends the transfer to a membership, see WeightSending.abandon."""
        weights = self._weights
        await self._told(self._ranks.beside(weights.senders, WeightSending.abandon, weights.control_s, membership))

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends the weights of the last push to newcomers, see WeightSending.add_newcomers."""
        weights = self._weights
        call = self._ranks.beside(
            weights.senders, WeightSending.add_newcomers, weights.timeout_s, membership, world_size
        )
        await self._told(call)

    async def take_snapshot(self, folder: str, step: int, copies: bool) -> None:
        """Copies the state after `step`, see Snapshots.take_snapshot."""
        timeout_s = self._checkpoint.timeout_s
        await self._told(self._ranks.call(Snapshots.take_snapshot, timeout_s, folder, step, copies))

    async def write_snapshot(self) -> None:
        """Writes the snapshot to disk, see Snapshots.write_snapshot."""
        await self._told(self._ranks.beside(self._count, Snapshots.write_snapshot, self._checkpoint.timeout_s))

    async def restore(self, folder: str) -> None:
        """Restores a snapshot, see Snapshots.restore."""
        try:
            await self._told(self._ranks.call(Snapshots.restore, self._checkpoint.timeout_s, folder))
        except InvalidArgument as error:
            raise InvalidArgument(f"orchestrator.policy: {error}") from None

    async def save(self, folder: str) -> str:
        """Writes the model, see Snapshots.save."""
        return await self._told(self._ranks.call(Snapshots.save, self._timeouts.train_s, folder))

    async def close(self) -> None:
        """Ends the actors, in order if they still answer."""
        with contextlib.suppress(PolicyError, ServiceError):
            await self._told(self._ranks.beside(self._weights.senders, WeightSending.leave, LEAVE_S))
        self.stop()

    def stop(self) -> None:
        """Ends the actors."""
        self._ranks.stop()

    async def _told(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except (RanksLost, DeadlineExceeded) as error:
            try:
                self._ranks.check()
            except RanksLost:
                raise PolicyError(str(error)) from None
            raise
