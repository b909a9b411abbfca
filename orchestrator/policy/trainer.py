"""The policy learner: log-probs and one PPO batch's worth of training."""

from collections.abc import Sequence

from orchestrator.algorithms.contract import Algorithm
from orchestrator.policy.clipped import ClippedPolicy
from orchestrator.policy.sending import WeightSending
from quartet.columns import Columns
from quartet.config.learner import PolicyConfig
from quartet.learner.learner import RankLearner
from quartet.learner.lora import add_adapters
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Floats, Ints


class PolicyTrainer:
    """A language model under DeepSpeed, or one rank's share of it.

    Calls must not overlap. All ranks get the same calls in the same order, but for those that say otherwise.
    """

    def __init__(
        self,
        config: PolicyConfig,
        algorithm: Algorithm,
        distribution: Distribution,
        ranks: Ranks | None = None,
        *,
        adapters: bool = False,
    ) -> None:
        """`adapters`: pushes bring the adapters of `config.lora` alone."""
        self._algorithm = algorithm
        self._distribution = distribution
        model = load_causal(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        add_adapters(model, config.lora)
        self.learner = RankLearner(model, config, ranks, kind="policy", exported=True)
        self._trainer = Trainer(self.learner)
        self.sending = WeightSending(self.learner, adapters=config.lora if adapters else None)

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, its learner, and what sends the weights."""
        return self, self.learner, self.sending

    def logprobs(self, trajectories: Columns, distribution: Distribution | None = None) -> Floats:
        """log pi(y_t | prefix) under the current weights, in the distribution sampled from or in another; [M]."""
        asked = distribution or self._distribution
        logprobs: Floats = self._trainer.evaluate(trajectories, lambda model, pairs: asked.asked_of(model, pairs)[0])
        return logprobs

    def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first, over the whole vocabulary; [T - 1] for each sequence."""
        trajectories = Columns.of_pairs([row[:1] for row in sequences], [row[1:] for row in sequences])
        return trajectories.with_sampled(logprobs=self.logprobs(trajectories, Distribution())).rows("logprobs")

    def train(self, batch: Columns, kl_coef: float, seed: int) -> dict[str, float]:
        """Trains on one batch by ClippedPolicy, as Trainer.train does.

        `first_log_ratio_max` is 0 but for rounding: nothing has moved yet. Anything else is a defect; but where
        algorithm.old_logprobs is rollout, it is the distance from the engine: rounding, and the age of the samples.
        ValueError if the batch has no old log-probs and the update needs them, see Algorithm.needs_old_logprobs.
        """
        algorithm, bare = self._algorithm, "old_logprobs" not in batch
        if bare and algorithm.needs_old_logprobs(len(batch)):
            raise ValueError(f"{len(batch)} responses have no old_logprobs, and this update needs them")
        objective = ClippedPolicy(algorithm, self._distribution, kl_coef)
        schedule = Schedule(algorithm.epochs, algorithm.minibatch_size, seed)
        return self._trainer.train(batch, objective, schedule, keep=bare)

    def trained_logprobs(self) -> list[Floats]:
        """The learner's log-probs of a batch that came without them, as its first optimizer step computed them before
        it changed the weights: [T] for each response of that step, [0] for others. Every rank calls it, once."""
        return self._trainer.computed()
