"""The interface of scorers: pairs in, for each one number out, or one for each name of the scorer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protos import reward_pb2 as pb
from quartet.wire.codec import Floats, Ints
from quartet.wire.pairs import Pair


@dataclass(frozen=True, slots=True)
class Scored:
    """One pair, as ids for models and as text for functions."""

    prompt_ids: Ints
    response_ids: Ints
    pair: Pair


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

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """The scores of each pair, [B, K] float32: one for each of K names, in their order, or a single one."""

    def check(self) -> None:
        """Raises if the scorer cannot score; for health checks."""
