"""The ranks of a training on examples as one model, with asynchronous methods."""

from pathlib import Path

from orchestrator.supervised.contract import Supervised
from orchestrator.supervised.trainer import SupervisedTrainer
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.learner.learner import RankLearner
from quartet.ranks.group import RankGroup
from quartet.ranks.thread_rank import ThreadRank
from quartet.wire.codec import Floats
from quartet.wire.errors import InvalidArgument


def ranks_of(training: Supervised) -> RankGroup:
    """The ranks of a training, which have no model yet: a single one in this process, several as Ray actors."""
    if training.ranks == 1:
        return RankGroup("model", [ThreadRank(training.rank_timeout_s)])
    from quartet.ranks.ray_rank import ray_ranks

    return ray_ranks("model", training)


class SupervisedModel:
    """The model that is trained. Methods raise RanksLost after a rank has died or is stuck."""

    name = "model"
    """Name of its folder in a checkpoint."""

    def __init__(self, ranks: RankGroup, training: Supervised) -> None:
        self._ranks = ranks
        self._training = training

    async def start(self) -> None:
        """Loads the model. ConfigError if it cannot be trained in this way."""
        await self._ranks.start(SupervisedTrainer, self._training, timeout_s=self._seconds)

    async def train(self, batch: Columns, seed: int) -> dict[str, float]:
        """Takes one optimizer step, see SupervisedTrainer.train."""
        return await self._ranks.call(SupervisedTrainer.train, self._seconds, self._ranks.share(batch), seed)

    async def outputs(self, examples: Columns) -> Floats:
        """The model's numbers for sampled tokens, [M]."""
        return await self._ranks.call(SupervisedTrainer.outputs, self._seconds, self._ranks.share(examples))

    async def describe(self, entries: dict[str, float]) -> None:
        """Adds entries to the config.json of the model that is saved."""
        await self._ranks.call(SupervisedTrainer.describe, self._seconds, entries)

    async def save(self, folder: Path) -> None:
        """Writes the model in Hugging Face's format."""
        await self._ranks.call(RankLearner.save, self._seconds, folder)

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        """Copies the state for its folder in a checkpoint; without copies, writes it at once."""
        folder, seconds = checkpoint / self.name, self._training.checkpoint.timeout_s
        await self._ranks.call(RankLearner.take_snapshot, seconds, folder, step, copies=copies)

    async def write_snapshot(self, checkpoint: Path) -> None:
        """Brings the copies to disk."""
        training = self._training
        await self._ranks.beside(training.ranks, RankLearner.write_snapshot, training.checkpoint.timeout_s)

    async def restore(self, checkpoint: Path) -> None:
        """Goes back to the state in a checkpoint. ConfigError if that does not hold it."""
        seconds = self._training.checkpoint.timeout_s
        try:
            await self._ranks.call(RankLearner.restore, seconds, checkpoint / self.name)
        except InvalidArgument as error:
            raise ConfigError(
                f"{checkpoint} cannot be restored: {error}. If it is broken, remove it to resume from the one before"
            ) from None

    @property
    def goes_on(self) -> bool:
        """True if the model was given up, but a call of it goes on, which nothing can end."""
        return self._ranks.goes_on

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.stop()

    @property
    def _seconds(self) -> float:
        return self._training.rank_timeout_s
