"""Batches for learners in rows, as a test writes them down, and calls that take and give rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from quartet.columns import Columns
from quartet.wire.codec import Bools, Floats, Ints
from tests import trajectories


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """B prompts and responses with the columns of ClippedPolicy, each field B arrays; None: no such column."""

    prompts: Sequence[Ints]
    responses: Sequence[Ints]
    logprobs: Sequence[Floats]
    old_logprobs: Sequence[Floats] | None
    ref_logprobs: Sequence[Floats] | None
    advantages: Sequence[Floats]
    kl_coef: float
    trained: Sequence[Bools] | None = None

    @classmethod
    def of(cls, columns: Columns, kl_coef: float) -> Self:
        """The rows of a batch; without `trained` where all tokens are trained on."""

        def rows(name: str) -> list[Any] | None:
            return columns.rows(name) if name in columns else None

        every = "trained" not in columns or columns["trained"].all()
        return cls(
            list(columns.prompts),
            list(columns.responses),
            columns.rows("logprobs"),
            rows("old_logprobs"),
            rows("ref_logprobs"),
            columns.rows("advantages"),
            kl_coef,
            None if every else rows("trained"),
        )

    @property
    def columns(self) -> Columns:
        """The batch as the learner takes it."""
        names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "trained")
        return _columns(self, names)


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """B prompts and responses with the columns of Value, each field B arrays; None: no such column."""

    prompts: Sequence[Ints]
    responses: Sequence[Ints]
    values: Sequence[Floats]
    returns: Sequence[Floats]
    trained: Sequence[Bools] | None = None

    @property
    def columns(self) -> Columns:
        """The batch as the learner takes it."""
        return _columns(self, ("values", "returns", "trained"))


def _columns(batch: PolicyBatch | CriticBatch, names: Sequence[str]) -> Columns:
    rows = {name: getattr(batch, name) for name in names}
    given = {name: numbers for name, numbers in rows.items() if numbers is not None}
    return trajectories.of(batch.prompts, batch.responses, **given)


def train_policy(trainer: Any, batch: PolicyBatch, seed: int) -> dict[str, float]:
    """Trains a PolicyTrainer."""
    metrics: dict[str, float] = trainer.train(batch.columns, batch.kl_coef, seed)
    return metrics


def train_critic(trainer: Any, batch: CriticBatch, **schedule: int) -> dict[str, float]:
    """Trains a CriticTrainer."""
    metrics: dict[str, float] = trainer.train(batch.columns, **schedule)
    return metrics


def logprob_rows(model: Any, prompts: Sequence[Ints], responses: Sequence[Ints], *asked: Any) -> list[Floats]:
    """The log-probs of a PolicyTrainer or a FrozenModel, [T] for each response."""
    return trajectories.cut(model.logprobs(trajectories.of(prompts, responses), *asked), responses)


def value_rows(trainer: Any, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
    """The values of a CriticTrainer, [T] for each response."""
    return trajectories.cut(trainer.values(trajectories.of(prompts, responses)), responses)
