"""Function scorers for tests, named by import path."""

from collections.abc import Sequence
from typing import Any

from services.common.wire.pairs import Pair


def length(pairs: Sequence[Pair]) -> list[float]:
    """Words of the response."""
    return [float(len(pair.response.split())) for pair in pairs]


def matches(pairs: Sequence[Pair]) -> list[float]:
    """1 where the response is the label."""
    return [float(pair.response == pair.label) for pair in pairs]


def too_few(pairs: Sequence[Pair]) -> list[float]:
    return [0.0] * (len(pairs) - 1)


def not_finite(pairs: Sequence[Pair]) -> list[float]:
    return [float("nan")] * len(pairs)


def too_large(pairs: Sequence[Pair]) -> list[float]:
    """Finite in Python, infinite in float32."""
    return [1e39] * len(pairs)


def broken(pairs: Sequence[Pair]) -> Any:
    raise KeyError("nothing here")
