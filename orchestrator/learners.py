"""The models that a run trains, as the loop sees them: the policy, which is in `policy`, and the critic
if there is one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.config.run import OrchestratorConfig
from quartet.columns import Columns
from quartet.ranks.group import RanksLost
from services.critic.client import CriticClient, CriticReset

LOSSES = (RanksLost, CriticReset)
"""Errors that say that a learner has lost its training, so that the run has to go back to its last checkpoint."""


@dataclass(frozen=True, slots=True)
class Update:
    """One PPO batch of B responses, for every learner."""

    step: int
    """The PPO step that this is, from 1."""
    seed: int
    """Seed of the minibatches' order."""
    columns: Columns
    """The samples, with the columns that the learners read: those of ClippedPolicy, and in a run with a critic its
    values before the update and the `returns` that these should be; `trained` is True at the tokens that are trained
    on, which without it are all."""
    kl_coef: float
    """Coefficient of the KL penalty in the policy's loss; used when that is where the penalty is."""


class Snapshotted(Protocol):
    """A model whose state goes into checkpoints."""

    @property
    def name(self) -> str:
        """Name of its folder in a checkpoint."""

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        """Copies its state after `step` for its folder in `checkpoint`; without copies, writes it now."""

    async def write_snapshot(self, checkpoint: Path) -> None:
        """Brings the copies to disk."""


class Learner(Snapshotted, Protocol):
    """A model that a run trains, checkpoints and restores. Methods raise one of LOSSES if its training is lost."""

    @property
    def prefix(self) -> str:
        """First part of the names of its metrics."""

    async def train(self, update: Update) -> dict[str, float]:
        """Trains on one batch; returns the mean metrics of its optimizer steps."""

    async def restore(self, checkpoint: Path) -> None:
        """Goes back to its state in `checkpoint`. InvalidArgument if that does not hold it."""


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
        """The service's name for its folder in a checkpoint, whose path is absolute and under the root."""
        return (checkpoint / self.name).relative_to(Path(self._config.checkpoint.root).resolve()).as_posix()
