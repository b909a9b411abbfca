"""A training on examples on one rank: its model under DeepSpeed, and the methods that the command calls."""

from pathlib import Path

import torch

from orchestrator.supervised.contract import Supervised
from quartet.columns import Columns
from quartet.learner.learner import RankLearner, Snapshots
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.loading import load_tokenizer
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Floats


class SupervisedTrainer:
    """A model under DeepSpeed, or one rank's share of it. Calls must not overlap, and all ranks get all calls."""

    def __init__(self, training: Supervised, ranks: Ranks | None = None) -> None:
        torch.manual_seed(training.seed)
        self._training = training
        self._learner = RankLearner(training.load(), training, ranks)
        self._trainer = Trainer(self._learner)
        self._objective = training.objective()
        self.snapshots = Snapshots(self._learner, self._write, kind=training.owner, exported=False)

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, and its snapshots."""
        return self, self.snapshots

    def train(self, batch: Columns, seed: int) -> dict[str, float]:
        """Takes one optimizer step over a batch; its metrics, see Trainer.train."""
        return self._trainer.train(batch, self._objective, Schedule(1, len(batch), seed))

    def outputs(self, examples: Columns) -> Floats:
        """Numbers for sampled tokens of the model that `save` writes, see Supervised.outputs; [M]."""
        with self._learner.averaged():
            outputs: Floats = self._trainer.evaluate(examples, self._training.outputs, last=self._objective.last)
        return outputs

    def describe(self, entries: dict[str, float]) -> None:
        """Adds entries to the config.json of the model that is saved."""
        for name, value in entries.items():
            setattr(self._learner.module.config, name, value)  # type: ignore[union-attr]

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self._training.write(self._learner.module, folder, weights)
        load_tokenizer(self._training.model).save_pretrained(folder)
