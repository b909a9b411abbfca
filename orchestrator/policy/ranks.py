"""The policy learner as Ray actors, with asynchronous methods that each have a deadline."""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.config.run import OrchestratorConfig
from orchestrator.learners import Update
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


class Policy:
    """The policy: a Learner, and the source of the weights that are pushed. Every method raises RanksLost after a
    rank has died or is stuck; a run can then resume from a checkpoint."""

    name, prefix = "policy", "policy"

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
        ranks = ray_ranks(cls.name, config.policy)
        arguments = (config.scheduled_policy, config.sized_algorithm, distribution)
        build = partial(PolicyTrainer, adapters=config.weights.adapters)
        await ranks.start(build, *arguments, timeout_s=config.timeouts.start_s)
        return cls(ranks, config)

    async def logprobs(self, trajectories: Columns) -> Floats:
        """Log-probs under the current weights, as PolicyTrainer.logprobs."""
        bare = self._ranks.share(trajectories.select())
        return await self._ranks.call(PolicyTrainer.logprobs, self._config.timeouts.train_s, bare)

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs over the whole vocabulary, as PolicyTrainer.score."""
        shared = self._ranks.share(sequences)
        return await self._ranks.call(PolicyTrainer.score, self._config.weights.timeout_s, shared)

    async def train(self, update: Update) -> dict[str, float]:
        """Trains on the batch's advantages, as PolicyTrainer.train; does nothing, and measures nothing, in the
        critic's own steps."""
        if not self._config.algorithm.trains_policy(update.step):
            return {}
        batch, seconds = self._ranks.share(ClippedPolicy.select(update.columns)), self._config.timeouts.train_s
        return await self._ranks.call(PolicyTrainer.train, seconds, batch, update.kl_coef, update.seed)

    async def trained_logprobs(self) -> list[Floats]:
        """Log-probs that the last update computed, as PolicyTrainer.trained_logprobs."""
        return await self._ranks.call(PolicyTrainer.trained_logprobs, self._config.timeouts.train_s)

    async def places(self) -> list[Place]:
        """The place of each sending rank, see WeightSending.place."""
        return await self._ask_senders(WeightSending.place, self._config.weights.timeout_s)

    async def rendezvous(self, backend: str) -> list[tuple[str, int]]:
        """The address and the port of each sending rank, see WeightSending.rendezvous."""
        weights = self._config.weights
        return await self._ask_senders(
            WeightSending.rendezvous,
            weights.timeout_s,
            backend,
            host=weights.host,
            bucket_bytes=weights.bucket_mib << 20,
            stall_s=weights.stall_s,
            senders=weights.senders,
            on_gpu=weights.stage == "gpu",
        )

    async def manifest(self) -> bytes:
        """The packed manifest, see WeightSending.manifest."""
        weights = self._config.weights
        return (await self._ask_senders(WeightSending.manifest, weights.timeout_s, weights.bucket_mib << 20))[0]

    async def join(self, membership: int, world_size: int) -> None:
        """Forms the push group, see WeightSending.join."""
        await self._ask_senders(WeightSending.join, self._config.weights.stall_s + 5, membership, world_size)

    async def gather(self, push: int) -> None:
        """Takes the weights of this push, see WeightSending.gather."""
        await self._ranks.call(WeightSending.gather, self._config.weights.timeout_s, push)

    async def send(self, push: int) -> str:
        """Sends the weights of this push; the checksum. See WeightSending.send."""
        sent = await self._ask_senders(WeightSending.send, self._config.weights.timeout_s + 1, push)
        return checksum({number: digest for digests in sent for number, digest in digests.items()})

    async def abandon(self, membership: int) -> None:
        """Ends the transfer to a membership, see WeightSending.abandon."""
        await self._ask_senders(WeightSending.abandon, self._config.weights.control_s, membership)

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends the weights of the last push to newcomers, see WeightSending.add_newcomers."""
        seconds = self._config.weights.timeout_s
        await self._ask_senders(WeightSending.add_newcomers, seconds, membership, world_size)

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        """Copies the state and the model for its folder in a checkpoint; without copies, writes them at once."""
        folder, seconds = checkpoint / self.name, self._config.checkpoint.timeout_s
        await self._ranks.call(RankLearner.take_snapshot, seconds, folder, step, copies=copies)

    async def write_snapshot(self, checkpoint: Path) -> None:
        """Brings the copies to disk."""
        config = self._config
        await self._ranks.beside(config.policy.ranks, RankLearner.write_snapshot, config.checkpoint.timeout_s)

    async def restore(self, checkpoint: Path) -> None:
        """Restores the state, on ranks of the same layout."""
        seconds = self._config.checkpoint.timeout_s
        try:
            await self._ranks.call(RankLearner.restore, seconds, checkpoint / self.name)
        except InvalidArgument as error:
            raise InvalidArgument(f"orchestrator.policy: {error}") from None

    async def save(self, folder: Path) -> None:
        """Writes the model in Hugging Face's format, see RankLearner.save."""
        await self._ranks.call(RankLearner.save, self._config.timeouts.train_s, folder)

    async def close(self) -> None:
        """Ends the actors, in order if they still answer."""
        with contextlib.suppress(RanksLost, ServiceError):
            await self._ask_senders(WeightSending.leave, 5.0)
        self._ranks.stop()

    async def _ask_senders(
        self,
        method: Method[Arguments, Answer],
        timeout_s: float,
        /,
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> list[Answer]:
        """Calls a method on the sending ranks, beside the call in progress; the answer of each."""
        return await self._ranks.beside(self._config.weights.senders, method, timeout_s, *arguments, **options)
