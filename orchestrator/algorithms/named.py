"""The section of one of several named scores, as `Algorithm.rewards` holds it."""

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import PositiveFloat, field_validator

from quartet.config.base import Config, Count


class NamedRewardConfig(Config):
    """One of the named scores of a response, as a term of the sum that is its score."""

    weight: float | tuple[tuple[Count, float], ...] = 1.0
    """Factor of the term. Pairs of a step and a factor change it during the run: it is that of the first pair before
    its step, that of the last pair after its step, and in between on the straight line. 0: measured, not rewarded."""
    clip: PositiveFloat | None = None
    """Clip to plus or minus this, after normalisation and before the factor. Null: no clip."""
    normalise: Literal["none", "running", "group"] = "none"
    """running: subtract the mean of all scores of this name so far, and divide by their deviation. group: the same by
    the scores of the responses to one prompt (GDPO), so that names of different spreads count alike."""

    @field_validator("weight")
    @classmethod
    def _steps_ascend(cls, weight: Any) -> Any:
        if isinstance(weight, tuple):
            steps = [step for step, _ in weight]
            if not steps or any(before >= after for before, after in pairwise(steps)):
                raise ValueError("should be a number, or pairs of a step and a number whose steps ascend")
        return weight

    def weight_at(self, step: int) -> float:
        """The factor at a step, from 1."""
        if not isinstance(self.weight, tuple):
            return self.weight
        steps, weights = zip(*self.weight, strict=True)
        return float(np.interp(step, steps, weights))

    @property
    def counts(self) -> bool:
        """True if the factor is ever another than 0."""
        weights = [weight for _, weight in self.weight] if isinstance(self.weight, tuple) else [self.weight]
        return any(weights)
