"""The samples of one step as tensors for the estimates."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.experience.experience import Collected, scores_of
from quartet.columns import Columns
from quartet.models.sequences import pad_rows
from quartet.wire.codec import Bools, Floats
from quartet.wire.pairs import SCORE


@dataclass(frozen=True)
class Batch:
    """B samples with at most T sampled tokens each. Tensors are padded on the right."""

    collected: Collected
    """The samples, with everything that the services answered."""
    oldest_trained: int | None = None
    """The oldest version whose tokens are trained on; None: tokens of any version are."""
    chosen: Bools | None = None
    """True at the samples that are trained on, [B]; None: all are."""

    @classmethod
    def of(cls, collected: Collected, oldest_trained: int | None = None, chosen: Bools | None = None) -> Self:
        """The samples, with a column `trained` if not all of their tokens may be: True at those that are."""
        if oldest_trained is not None or chosen is not None:
            columns = collected.columns
            trained = np.ones(collected.tokens, np.bool_) if chosen is None else chosen[columns.owners]
            trained = trained if oldest_trained is None else trained & (columns["versions"] >= oldest_trained)
            collected = collected.with_sampled(trained=trained)
        return cls(collected, oldest_trained, chosen)

    @property
    def columns(self) -> Columns:
        """The columns of the B samples."""
        return self.collected.columns

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def lengths(self) -> Tensor:
        """Sampled tokens of each response, [B] int64."""
        return torch.from_numpy(self.columns.counts).long()

    @cached_property
    def sampled(self) -> Tensor:
        """True on sampled tokens, [B, T] bool."""
        return torch.from_numpy(self.columns.present)

    @cached_property
    def mask(self) -> Tensor:
        """True on the sampled tokens that are trained on, [B, T] bool."""
        return self.sampled if "trained" not in self.columns else self.column("trained")

    @property
    def sequences(self) -> Tensor | None:
        """The sequence of its trajectory that a sampled token is in, from 0, [B, T] int64; None where each trajectory
        is one."""
        columns = self.columns
        if columns.begins is None:
            return None
        begun = np.cumsum(columns.begins)
        places: NDArray[np.int64] = begun[columns.sampled_at] - begun[columns.starts][columns.owners]
        return torch.from_numpy(columns.with_sampled(sequence=places).padded("sequence"))

    def sampled_since(self, version: int) -> Tensor:
        """True on the tokens that were sampled by this version or a later one, [B, T] bool."""
        return torch.from_numpy(self.columns.padded("versions") >= version) & self.sampled

    @property
    def too_old(self) -> float:
        """Share of the sampled tokens that are too old to be trained on."""
        return 0.0 if self.oldest_trained is None else float((self.columns["versions"] < self.oldest_trained).mean())

    @property
    def left_out(self) -> int:
        """Number of samples that are not chosen."""
        return 0 if self.chosen is None else int((~self.chosen).sum())

    @property
    def reasons(self) -> str:
        """The reasons why some of the tokens are not trained on, each with the settings that decide it."""
        old = f"{self.too_old:.0%} of its tokens are older than algorithm.max_token_staleness"
        rest = f"algorithm.zero_variance and truncated leave out {self.left_out} of its {len(self)} responses"
        return ", and ".join([old] * (self.too_old > 0) + [rest] * (self.left_out > 0))

    @cached_property
    def groups(self) -> Tensor:
        """Number of each sample's group, [B] int64."""
        return torch.tensor(self.columns["group"])

    def column(self, name: str) -> Tensor:
        """A column of one number per sampled token, [B, T], zeros at the padding."""
        padded = self.columns.padded(name)
        # Bytes that were received cannot be written to, and torch knows no such tensors.
        return torch.from_numpy(padded if padded.flags.writeable else padded.copy())

    @cached_property
    def logprobs(self) -> Tensor:
        """The rollout engine's log-probs, as sampled, [B, T]."""
        return self.column("logprobs")

    @cached_property
    def old_logprobs(self) -> Tensor | None:
        """The learner's log-probs before the update, [B, T]; None if they are not known (yet)."""
        return self.column("old_logprobs") if "old_logprobs" in self.columns else None

    @cached_property
    def ref_logprobs(self) -> Tensor | None:
        """The frozen reference's log-probs, [B, T]; None if the run has no reference."""
        return self.column("ref_logprobs") if "ref_logprobs" in self.columns else None

    @cached_property
    def values(self) -> Tensor:
        """The critic's values before the update, [B, T]; only for a run with a critic."""
        return self.column("values")

    @cached_property
    def scores(self) -> Tensor:
        """The scores, [B]; of several named ones the sum."""
        return torch.tensor(self.columns["score"])

    @cached_property
    def parts(self) -> Tensor | None:
        """The parts of the scores at the tokens that earned them, [B, T]: rewards of turns, and those that the scorer
        gave; None without."""
        kinds = [self.column(name) for name in ("turn_rewards", "process_rewards") if name in self.columns]
        return sum(kinds[1:], start=kinds[0]) if kinds else None

    @cached_property
    def named_scores(self) -> dict[str, Tensor]:
        """Name -> scores, [B], where they have names."""
        return {name: torch.tensor(each) for name, each in scores_of(self.columns).items() if name != SCORE}

    @property
    def by_task(self) -> dict[str, Tensor]:
        """Task -> the places of its samples, in the order of the tasks' names; none of prompts without a task."""
        tasks = np.asarray([prompt.task for prompt in self.collected.prompts], np.str_)
        return {task: torch.from_numpy(np.flatnonzero(tasks == task)) for task in sorted({*tasks.tolist()} - {""})}

    @property
    def truncated(self) -> float:
        """Share of responses that the length limit cut off."""
        return int(self.columns["truncated"].sum()) / len(self)

    def padded(self, rows: Sequence[Floats]) -> Tensor:
        """Pads B arrays [t] of one value per sampled token to [B, T]."""
        return pad_rows(rows, self.sampled.shape[1])

    def packed(self, padded: Tensor) -> Any:
        """[M] the numbers of [B, T] at sampled tokens, as a column of this batch has them."""
        return self.columns.unpadded(padded.numpy())
