"""A training on examples on one rank: its model under DeepSpeed, and the methods that the command calls."""

import torch

from orchestrator.supervised.contract import Supervised
from quartet.columns import Columns
from quartet.learner.learner import RankLearner
from quartet.learner.trainer import Schedule, Trainer
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Floats


class SupervisedTrainer:
    """A model under DeepSpeed, or one rank's share of it. Calls must not overlap, and all ranks get all calls."""

    def __init__(self, training: Supervised, ranks: Ranks | None = None) -> None:
        torch.manual_seed(training.seed)
        self._training = training
        self.learner = RankLearner(training.load(), training, ranks, kind=training.owner, write=training.write)
        self._trainer = Trainer(self.learner)
        self._objective = training.objective()

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, and its learner."""
        return self, self.learner

    def train(self, batch: Columns, seed: int) -> dict[str, float]:
        """Takes one optimizer step over a batch; its metrics, see Trainer.train."""
        return self._trainer.train(batch, self._objective, Schedule(1, len(batch), seed))

    def outputs(self, examples: Columns) -> Floats:
        """Numbers for sampled tokens of the model as it would be saved, see Supervised.outputs; [M]."""
        with self.learner.averaged():
            outputs: Floats = self._trainer.evaluate(examples, self._training.outputs, last=self._objective.last)
        return outputs

    def describe(self, entries: dict[str, float]) -> None:
        """Adds entries to the config.json of the model that is saved."""
        for name, value in entries.items():
            setattr(self.learner.module.config, name, value)  # type: ignore[union-attr]
