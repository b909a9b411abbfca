"""A model that a run trains, as the loop sees it, and one step's batch for all of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quartet.columns import Columns
from quartet.ranks.group import RanksLost
from services.critic.client import CriticReset

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


class Learner(Protocol):
    """A model that a run trains, checkpoints and restores. Methods raise one of LOSSES if its training is lost."""

    @property
    def name(self) -> str:
        """Name of its folder in a checkpoint."""

    @property
    def prefix(self) -> str:
        """First part of the names of its metrics."""

    async def train(self, update: Update) -> dict[str, float]:
        """Trains on one batch; returns the mean metrics of its optimizer steps."""

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        """Copies its state after PPO step `step` for its folder in `checkpoint`; without copies, writes it now."""

    async def write_snapshot(self, checkpoint: Path) -> None:
        """Brings the copies to disk."""

    async def restore(self, checkpoint: Path) -> None:
        """Goes back to its state in `checkpoint`. InvalidArgument if that does not hold it."""
