"""The critic service as one of the learners."""

from pathlib import Path

from orchestrator.config.run import OrchestratorConfig
from orchestrator.learners.learner import Update
from quartet.config.base import ConfigError
from services.critic.client import CriticClient


class CriticLearner:
    """The critic service, a Learner. Its metrics are those of the value function."""

    name, prefix = "critic", "value"

    def __init__(self, critic: CriticClient, config: OrchestratorConfig, first_step: int) -> None:
        """`first_step` is the critic's last training step before the run's first one."""
        self._critic = critic
        self._config = config
        self._first_step = first_step

    async def train(self, update: Update) -> dict[str, float]:
        """Trains on the returns; CriticReset unless the critic's last step is the one before this."""
        last_step, algorithm = self._first_step + update.step - 1, self._config.algorithm
        return await self._critic.train(
            last_step + 1,
            update.columns,
            epochs=algorithm.epochs_of_critic,
            minibatch_size=algorithm.minibatch_size,
            seed=update.seed,
            last_step=last_step,
            timeout_s=self._config.timeouts.train_s,
        )

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        """Copies the state, which must be the one after `step`; without copies, writes it at once."""
        name, last_step = self._folder(checkpoint), self._first_step + step
        await self._critic.take_checkpoint(name, last_step, self._timeout_s, copies=copies)

    async def write_snapshot(self, checkpoint: Path) -> None:
        """Brings the copies to disk."""
        await self._critic.write_checkpoint(self._folder(checkpoint), self._timeout_s)

    async def restore(self, checkpoint: Path) -> None:
        """Restores the state; the critic loses later steps."""
        await self._critic.restore_checkpoint(self._folder(checkpoint), self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        return self._config.checkpoint.timeout_s

    def _folder(self, checkpoint: Path) -> str:
        """The service's name for its folder in a checkpoint, whose path is absolute.

        Raises:
            ConfigError: the checkpoint is not under the root.
        """
        root = Path(self._config.checkpoint.root).resolve()
        if not checkpoint.is_relative_to(root):
            raise ConfigError(
                f"orchestrator.checkpoint.folder: {checkpoint} is not under orchestrator.checkpoint.root, {root}; "
                "the critic writes nowhere else"
            )
        return (checkpoint / self.name).relative_to(root).as_posix()
