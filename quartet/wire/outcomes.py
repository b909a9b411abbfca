"""Outcomes of pairs that were to be scored. A pair that is not scored has no number: NaN stands where it would be."""

from dataclasses import dataclass
from enum import IntEnum


class Outcome(IntEnum):
    """The same as `Outcome` of protos/reward.proto."""

    SCORED = 0
    NOT_APPLICABLE = 1
    """The scorer has nothing to say about such a pair."""
    TIMEOUT = 2
    FAILED = 3
    REFUSED = 4
    """A judge, or another service that the scorer asks, declined."""
    NOT_FINITE = 5
    """The scorer gave no finite float32."""


MAY_PASS = frozenset({Outcome.TIMEOUT, Outcome.FAILED, Outcome.REFUSED})
"""Outcomes that may be others when the pair is sent again."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """A pair without a score. A function scorer may return it for a pair in the place of a number."""

    outcome: Outcome
    """Any but SCORED."""
    reason: str
    """For people, without secrets."""

    def __str__(self) -> str:
        return f"{self.outcome.name.lower().replace('_', ' ')}: {self.reason}"
