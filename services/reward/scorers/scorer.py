"""The interface of scorers: pairs in, one number each out."""

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
    """Name, hash and weight of the scorer."""
    max_length: int
    """Longest pair that it takes, in tokens."""
    batch_tokens: int
    """Most tokens that it scores at a time."""
    texts: bool
    """True if it reads texts."""
    vocab_size: int | None
    """Entries of its vocabulary; None if it has no vocabulary."""

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """One score per pair, [B] float32."""

    def check(self) -> None:
        """Raises if the scorer cannot score; for health checks."""
