"""The policy learner as Ray actors, with asynchronous methods that each have a deadline."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config.run import OrchestratorConfig
from orchestrator.policy.clipped import ClippedPolicy
from orchestrator.policy.sending import WeightSending
from orchestrator.policy.trainer import PolicyTrainer
from quartet.columns import Columns
from quartet.learner.learner import RankLearner
from quartet.models.distribution import Distribution
from quartet.ranks.group import Answer, Arguments, Method, RankGroup, RanksLost
from quartet.ranks.ray_rank import ray_ranks
from quartet.weight_transfer.memory.buckets import checksum
from quartet.weight_transfer.place import Place
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import InvalidArgument, ServiceError

DEADLINES: Mapping[Method[..., Any], Callable[[OrchestratorConfig], float]] = {
    PolicyTrainer.logprobs: lambda config: config.timeouts.train_s,
    PolicyTrainer.score: lambda config: config.weights.timeout_s,
    PolicyTrainer.train: lambda config: config.timeouts.train_s,
    PolicyTrainer.trained_logprobs: lambda config: config.timeouts.train_s,
    WeightSending.place: lambda config: config.weights.timeout_s,
    WeightSending.rendezvous: lambda config: config.weights.timeout_s,
    WeightSending.manifest: lambda config: config.weights.timeout_s,
    WeightSending.join: lambda config: config.weights.stall_s + 5,
    WeightSending.gather: lambda config: config.weights.timeout_s,
    WeightSending.send: lambda config: config.weights.timeout_s + 1,
    WeightSending.abandon: lambda config: config.weights.control_s,
    WeightSending.add_newcomers: lambda config: config.weights.timeout_s,
    WeightSending.leave: lambda _: 5.0,
    RankLearner.take_snapshot: lambda config: config.checkpoint.timeout_s,
    RankLearner.write_snapshot: lambda config: config.checkpoint.timeout_s,
    RankLearner.restore: lambda config: config.checkpoint.timeout_s,
    RankLearner.save: lambda config: config.timeouts.train_s,
}
"""Seconds that the ranks may take for each of their methods."""


class Policy:
    """The policy learner. Every method raises RanksLost after a rank has died or is stuck; a run can then resume from
    a checkpoint."""

    def __init__(self, ranks: RankGroup, config: OrchestratorConfig) -> None:
        self._ranks = ranks
        self._config = config
        self.memberships = 0
        """Highest number of a push group that was asked for, see WeightSource."""

    @classmethod
    async def start(cls, config: OrchestratorConfig, distribution: Distribution) -> "Policy":
        """Starts one actor for each rank and returns when their models are loaded.

        Args:
            config: the run's configuration.
            distribution: the one that responses are sampled from.

        Raises:
            ResourceExhausted: it took longer than timeouts.start_s, usually because the cluster lacks CPUs or GPUs.
            RanksLost: a rank died while it started.
        """
        ranks = ray_ranks("policy", config.policy)
        arguments = (config.scheduled_policy, config.sized_algorithm, distribution)
        build = partial(PolicyTrainer, adapters=config.weights.adapters)
        await ranks.start(build, *arguments, timeout_s=config.timeouts.start_s)
        return cls(ranks, config)

    async def logprobs(self, trajectories: Columns) -> Floats:
        """Log-probs under the current weights, as PolicyTrainer.logprobs."""
        return await self._all(PolicyTrainer.logprobs, self._ranks.share(trajectories.select()))

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs over the whole vocabulary, as PolicyTrainer.score."""
        return await self._all(PolicyTrainer.score, self._ranks.share(sequences))

    async def train(self, batch: Columns, kl_coef: float, seed: int) -> dict[str, float]:
        """Trains on one batch, as PolicyTrainer.train."""
        return await self._all(PolicyTrainer.train, self._ranks.share(ClippedPolicy.select(batch)), kl_coef, seed)

    async def trained_logprobs(self) -> list[Floats]:
        """Log-probs that the last update computed, as PolicyTrainer.trained_logprobs."""
        return await self._all(PolicyTrainer.trained_logprobs)

    async def places(self) -> list[Place]:
        """The place of each sending rank, see WeightSending.place."""
        return await self._beside(WeightSending.place)

    async def rendezvous(self, backend: str) -> list[tuple[str, int]]:
        """The address and the port of each sending rank, see WeightSending.rendezvous."""
        weights = self._config.weights
        return await self._beside(
            WeightSending.rendezvous,
            backend,
            host=weights.host,
            bucket_bytes=weights.bucket_mib << 20,
            stall_s=weights.stall_s,
            senders=weights.senders,
            on_gpu=weights.stage == "gpu",
        )

    async def manifest(self) -> bytes:
        """The packed manifest, see WeightSending.manifest."""
        return (await self._beside(WeightSending.manifest, self._config.weights.bucket_mib << 20))[0]

    async def join(self, membership: int, world_size: int) -> None:
        """Forms the push group, see WeightSending.join."""
        await self._beside(WeightSending.join, membership, world_size)

    async def gather(self, push: int) -> None:
        """Takes the weights of this push, see WeightSending.gather."""
        await self._all(WeightSending.gather, push)

    async def send(self, push: int) -> str:
        """Sends the weights of this push; the checksum. See WeightSending.send."""
        sent = await self._beside(WeightSending.send, push)
        return checksum({number: digest for digests in sent for number, digest in digests.items()})

    async def abandon(self, membership: int) -> None:
        """Ends the transfer to a membership, see WeightSending.abandon."""
        await self._beside(WeightSending.abandon, membership)

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends the weights of the last push to newcomers, see WeightSending.add_newcomers."""
        await self._beside(WeightSending.add_newcomers, membership, world_size)

    async def take_snapshot(self, folder: str, step: int, copies: bool) -> None:
        """Copies the state after `step`, see RankLearner.take_snapshot."""
        await self._all(RankLearner.take_snapshot, Path(folder), step, copies=copies)

    async def write_snapshot(self) -> None:
        """Writes the snapshot to disk, see RankLearner.write_snapshot."""
        await self._beside(RankLearner.write_snapshot)

    async def restore(self, folder: str) -> None:
        """Restores a snapshot, see RankLearner.restore."""
        try:
            await self._all(RankLearner.restore, Path(folder))
        except InvalidArgument as error:
            raise InvalidArgument(f"orchestrator.policy: {error}") from None

    async def save(self, folder: Path) -> None:
        """Writes the model, see RankLearner.save."""
        await self._all(RankLearner.save, folder)

    async def close(self) -> None:
        """Ends the actors, in order if they still answer."""
        with contextlib.suppress(RanksLost, ServiceError):
            await self._beside(WeightSending.leave)
        self.stop()

    def stop(self) -> None:
        """Ends the actors."""
        self._ranks.stop()

    async def _all(
        self, method: Method[Arguments, Answer], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Answer:
        """Calls a method on all ranks in turn; rank 0's answer."""
        return await self._ranks.call(method, DEADLINES[method](self._config), *arguments, **options)

    async def _beside(
        self, method: Method[Arguments, Answer], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> list[Answer]:
        """Calls a method beside the one in progress, on the sending ranks, or on all for a part that each has; the
        answer of each."""
        config = self._config
        count = config.policy.ranks if method is RankLearner.write_snapshot else config.weights.senders
        return await self._ranks.beside(count, method, DEADLINES[method](config), *arguments, **options)
