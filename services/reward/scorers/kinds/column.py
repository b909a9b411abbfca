"""The number in a column of a pair."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair
from services.reward.scorers.kinds.answers import Given

_LARGEST = float(np.finfo(np.float32).max)


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], list[Given]]:
    """The scorer's function."""
    column, missing = options["column"], options["missing"]

    def one(pair: Pair) -> Given:
        value = pair.columns.get(column)
        value = missing if value is None else value
        if isinstance(value, int | float) and abs(value) <= _LARGEST:  # true and false are 1 and 0
            return float(value)
        told = "is missing" if value is None else "holds no number"
        return Unscored(Outcome.NOT_APPLICABLE, f"column {column!r} {told}")

    return lambda pairs: [one(pair) for pair in pairs]
