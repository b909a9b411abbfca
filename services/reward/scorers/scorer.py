"""The interface of scorers: pairs in, for each one number out, or one for each name of the scorer."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos import reward_pb2 as pb
from quartet.wire.codec import Floats, Ints
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """One pair, as ids for models and as text for functions."""

    prompt_ids: Ints
    response_ids: Ints
    pair: Pair


@dataclass(frozen=True, slots=True)
class InParts:
    """The score of a pair of which parts are earned within the response."""

    score: Floats
    """With all parts, [1] float32."""
    places: NDArray[np.int64]
    """Place of each part, [P]: the number of characters of the response with which it is earned."""
    rewards: Floats
    """[P], finite."""


Result = Floats | InParts | Unscored
"""The scores of a pair, [K] float32, or the reason why it is not scored."""


def results(values: Floats, scorer: str) -> list[Result]:
    """The rows of [B, K]; those with a number that is not finite are not scored."""
    wrong = Unscored(Outcome.NOT_FINITE, f"{scorer} gave a score that is not finite in float32")
    return [row if good.all() else wrong for row, good in zip(values, np.isfinite(values), strict=True)]


class Scorer(Protocol):
    """Scores pairs."""

    identity: pb.ScorerIdentity
    """Name and hash of the scorer, and the names of its scores."""
    max_length: int
    """Longest pair that it takes, in tokens."""
    batch_tokens: int
    """Most tokens that it scores at a time."""
    texts: bool
    """True if it reads texts."""
    vocab_size: int | None
    """Entries of its vocabulary; None if it has no vocabulary."""
    names: tuple[str, ...]
    """Names of the scores of a pair; empty if there is one score."""
    passes: int
    """Most calls of `score` at the same time; more than one only if it is a coroutine function."""
    batch_s: float | None
    """Time after which a call counts as hung, in seconds: infinite if it ends by itself; None: limits.batch_s."""
    patience_s: float | None
    """Time without a success after which no more pairs are looked for that make it fail, in seconds; None: that of
    one pass."""

    def score(self, pairs: Sequence[EncodedPair]) -> Sequence[Result] | Awaitable[Sequence[Result]]:
        """For each of B pairs its scores, [K] float32, all finite: one for each of K names, in their order, or a
        single one; or the reason why it is not scored. May be a coroutine function.

        Raises:
            SpoiltError: one of the pairs makes it fail; holds the reason why that pair is not scored.
            HungError: it hangs, if `batch_s` is infinite.
        """

    def check(self) -> None:
        """Raises if the scorer cannot score; for health checks."""
