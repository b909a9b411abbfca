"""Samples with their prompts, encoded once for all services."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from orchestrator.data.prompts import Prompt
from quartet.wire.ragged import Ragged
from services.rollout.sample import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class Pairs:
    """B samples and their prompts."""

    numbers: Sequence[int]
    """The samples' numbers."""
    prompts: Sequence[Prompt]
    samples: Sequence[Sample]
    prompt_ids: Ragged
    """Token ids, B sequences."""
    responses: Ragged
    """Token ids, B sequences."""

    @classmethod
    def of(cls, numbers: Sequence[int], prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Self:
        """Encodes samples and prompts."""
        ids = Ragged.of([prompt.prompt_ids for prompt in prompts])
        return cls(numbers, prompts, samples, ids, Ragged.of([sample.response_ids for sample in samples]))

    @property
    def labels(self) -> list[str]:
        """The prompts' labels."""
        return [prompt.label for prompt in self.prompts]

    @property
    def ended(self) -> list[bool]:
        """True for each response that is complete."""
        return [sample.finish_reason is FinishReason.STOP for sample in self.samples]
