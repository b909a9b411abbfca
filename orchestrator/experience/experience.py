"""Experience: responses with everything that they are trained on, one by one and as a batch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np

from orchestrator.data.prompts import Prompt
from orchestrator.experience.pairs import Pairs
from quartet.wire.codec import Floats
from services.rollout.sample import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class Experience:
    """One response of T tokens with its score, log-probs and values."""

    number: int
    """Number of the sample, as in SampleRequest."""
    prompt: Prompt
    sample: Sample
    score: float
    """Score of the reward service."""
    ref_logprobs: Floats
    """The reference's log-probs, [T]; empty if the run has no reference."""
    values: Floats
    """The critic's values, [T]; empty if they were not requested."""
    old_logprobs: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    """The learner's log-probs before the update, [T]; empty if they were left for the loop."""

    @property
    def truncated(self) -> bool:
        """True if the length limit cut it off."""
        return self.sample.finish_reason is FinishReason.LENGTH

    @property
    def kl(self) -> float:
        """Sum over the response of log pi - log pi_ref: the k1 estimate, in nats. NaN without a reference."""
        if not len(self.ref_logprobs):
            return math.nan
        return float((self.sample.logprobs - self.ref_logprobs).sum())


@dataclass(frozen=True, slots=True)
class Finished:
    """One experience that is complete, with the moments of its making in seconds of the monotonic clock."""

    experience: Experience
    asked: float
    """Moment of the call of the rollout service."""
    sampled: float
    """Moment at which its sample came."""
    complete: float
    """Moment of the last answer."""


@dataclass(frozen=True)
class Collected:
    """One batch of experience, in the order of the samples' numbers."""

    experiences: list[Experience]
    generate_s: float
    """Seconds from the first request to the last finished sample."""
    score_s: float
    """Seconds that scoring took after that."""
    repeated: int = 0
    """Number of requests for samples that were repeated because their replica was lost, stuck or too old. No sample
    is in `experiences` twice."""
    discarded: tuple[int, ...] = ()
    """Numbers of the samples that were made for it and discarded with their groups, ascending."""
    kept: bool = False
    """True if it was read from the journal, and need not be written again."""

    @classmethod
    def of(cls, finished: Iterable[Finished], repeated: int, discarded: Iterable[int] = ()) -> Self:
        """A batch of these, in the order of their numbers."""
        rows = sorted(finished, key=lambda each: each.experience.number)
        asked, sampled = min((e.asked for e in rows), default=0), max((e.sampled for e in rows), default=0)
        complete = max((e.complete for e in rows), default=0)
        experiences, left_out = [each.experience for each in rows], tuple(sorted(discarded))
        return cls(experiences, sampled - asked, complete - sampled, repeated, left_out)

    @cached_property
    def pairs(self) -> Pairs:
        """The samples with their prompts, encoded once."""
        rows = self.experiences
        return Pairs.of([e.number for e in rows], [e.prompt for e in rows], [e.sample for e in rows])

    @property
    def numbers(self) -> list[int]:
        """Numbers of all samples that the step uses up: those that it trains on, and those discarded for it."""
        return [experience.number for experience in self.experiences] + list(self.discarded)

    @property
    def valued(self) -> bool:
        """True if every response has its values."""
        return all(len(e.values) == len(e.sample.response_ids) for e in self.experiences)

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return sum(len(experience.sample.response_ids) for experience in self.experiences)
