"""The critic's model on one rank: values, and training on one PPO batch at a time."""

import torch

from quartet.columns import Columns
from quartet.learner.learner import RankLearner
from quartet.learner.lora import add_adapters
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.loading import max_length
from quartet.models.scalar import load_value, values_of, write_value
from quartet.objectives.value import Value
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Floats
from services.critic.config import CriticConfig


class CriticTrainer:
    """A value model under DeepSpeed, or one rank's share of it. Calls must not overlap, and all ranks get all
    calls."""

    def __init__(self, config: CriticConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        model = load_value(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        add_adapters(model.body, config.lora)
        self.learner = RankLearner(model, config, ranks, kind="critic", write=write_value)
        self._trainer = Trainer(self.learner)

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, and its learner."""
        return self, self.learner

    def limits(self) -> tuple[int, int]:
        """Entries of the vocabulary, and the longest sequence in tokens."""
        body = self.learner.module.body
        return int(body.config.vocab_size), max_length(body.config)  # type: ignore[union-attr, arg-type]

    def values(self, trajectories: Columns) -> Floats:
        """The values V(prefix) before each sampled token, [M]."""
        values: Floats = self._trainer.evaluate(trajectories, values_of)
        return values

    def train(self, *parts: Columns, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Trains by Value on the batch that these parts are, as Trainer.train does."""
        batch, objective = Columns.concatenate(parts), Value(self._config.value_clip_eps)
        return self._trainer.train(batch, objective, Schedule(epochs, minibatch_size, seed))
