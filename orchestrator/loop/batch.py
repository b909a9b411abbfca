"""The samples of one step as columns, each encoded or padded once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from orchestrator.experience.experience import Collected, Experience
from orchestrator.policy.trainer import PolicyBatch
from quartet.models.numerics import response_mask
from quartet.models.sequences import pad_rows
from quartet.wire.codec import Bools, Floats
from quartet.wire.ragged import Ragged


@dataclass(frozen=True)
class Batch:
    """B samples, whose responses have at most T tokens. Columns are padded on the right."""

    collected: Collected
    """The samples, with everything that the services answered."""
    prompts: Ragged
    """Token ids, B sequences."""
    responses: Ragged
    """Token ids, B sequences."""
    lengths: Tensor
    """Tokens of each response, [B] int64."""
    old_logprobs: list[Floats] | None
    """The learner's log-probs before the update as B arrays [t]; None if they are not known (yet)."""
    oldest_trained: int | None
    """The oldest version whose tokens are trained on; None: tokens of any version are."""

    @classmethod
    def of(cls, collected: Collected, oldest_trained: int | None = None) -> Self:
        """The columns of these samples, in their order; with the old log-probs if all of them came with theirs."""
        pairs = collected.pairs
        lengths = torch.from_numpy(pairs.responses.lengths).long()
        early = [e.old_logprobs for e in collected.experiences]
        old_logprobs = early if all(len(row) for row in early) else None
        return cls(collected, pairs.prompt_ids, pairs.responses, lengths, old_logprobs, oldest_trained)

    def __len__(self) -> int:
        return len(self.experiences)

    @property
    def experiences(self) -> list[Experience]:
        """The B samples."""
        return self.collected.experiences

    @cached_property
    def sampled(self) -> Tensor:
        """True on response tokens, [B, T] bool."""
        return response_mask(self.lengths, int(self.lengths.max()))

    @cached_property
    def mask(self) -> Tensor:
        """True on the response tokens that are trained on, [B, T] bool."""
        if self.oldest_trained is None:
            return self.sampled
        return self.sampled_since(self.oldest_trained)

    def sampled_since(self, version: int) -> Tensor:
        """True on the response tokens that were sampled by this version or a later one, [B, T] bool."""
        return self.padded([e.sample.versions >= version for e in self.experiences]).bool()

    @property
    def masked(self) -> float:
        """Share of the response tokens that are not trained on."""
        return 1 - int(self.mask.sum()) / int(self.sampled.sum())

    @cached_property
    def logprobs(self) -> Tensor:
        """The rollout engine's log-probs, as sampled, [B, T]."""
        return self.padded([e.sample.logprobs for e in self.experiences])

    @cached_property
    def ref_logprobs(self) -> Tensor | None:
        """The frozen reference's log-probs, [B, T]; None if the run has no reference."""
        rows = self.reference_rows
        return None if rows is None else self.padded(rows)

    @property
    def reference_rows(self) -> list[Floats] | None:
        """The reference's log-probs as B arrays [t]; None if the run has no reference."""
        rows = [e.ref_logprobs for e in self.experiences]
        return rows if all(len(row) for row in rows) else None

    @cached_property
    def values(self) -> Tensor:
        """The critic's values before the update, [B, T]; only for a run with a critic."""
        return self.padded([e.values for e in self.experiences])

    @cached_property
    def scores(self) -> Tensor:
        """The scores, [B]."""
        return torch.tensor([e.score for e in self.experiences])

    @property
    def truncated(self) -> float:
        """Share of responses that the length limit cut off."""
        return sum(e.truncated for e in self.experiences) / len(self.experiences)

    def padded(self, rows: Sequence[Floats] | Sequence[Bools]) -> Tensor:
        """Pads B arrays [t] of one value per response token to [B, T]."""
        return pad_rows(rows, self.sampled.shape[1])

    def rows(self, column: Tensor) -> list[Any]:
        """Cuts [B, T] into B arrays [t], the inverse of `padded`."""
        return [row[:length].numpy() for row, length in zip(column, self.lengths.tolist(), strict=True)]

    def for_policy(self, advantages: Sequence[Floats], kl_coef: float) -> PolicyBatch:
        """The batch for the policy's update, with its advantages. All tokens are trained on unless some are
        masked."""
        return PolicyBatch(
            prompts=self.prompts,
            responses=self.responses,
            logprobs=[e.sample.logprobs for e in self.experiences],
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.reference_rows,
            advantages=advantages,
            kl_coef=kl_coef,
            trained=self.rows(self.mask) if self.masked else None,
        )
