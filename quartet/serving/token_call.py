"""A batcher's view of a call that asks for one number per sampled token."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from quartet.columns import Columns
from quartet.wire.codec import Floats

Item = TypeVar("Item")


class Asked(NamedTuple):
    """One trajectory of a call."""

    trajectories: Columns
    """All of the call."""
    row: int
    """Index of the one."""


def joined(asked: Sequence[Asked]) -> Columns:
    """The trajectories, which may be of several calls, in their order."""
    calls = [[*rows] for _, rows in groupby(asked, lambda each: id(each.trajectories))]
    parts = [rows[0].trajectories.take([each.row for each in rows]) for rows in calls]
    return Columns.concatenate(parts) if parts else Columns.of_pairs([], [])


class TokenCall(Generic[Item]):
    """B trajectories, and a number for each sampled token."""

    def __init__(self, trajectories: Columns, make: Callable[[Asked], Item]) -> None:
        """
        Args:
            trajectories: those of the call, without further columns.
            make: makes the model's input from a trajectory.
        """
        self._trajectories, self._make = trajectories, make
        self.costs = trajectories.lengths
        self.out: Floats = np.empty(trajectories.size("sampled"), np.float32)
        """[M] the results, all trajectories end to end."""
        self._ends = np.cumsum(trajectories.counts, dtype=np.int64)

    def items(self, rows: Sequence[int]) -> list[Item]:
        """The model's inputs for these rows."""
        return [self._make(Asked(self._trajectories, row)) for row in rows]

    def put(self, rows: Sequence[int], results: Sequence[Floats]) -> None:
        """Stores the numbers of these rows' sampled tokens."""
        for row, result in zip(rows, results, strict=True):
            end, count = int(self._ends[row]), int(self._trajectories.counts[row])
            if len(result) != count:
                raise RuntimeError(f"{len(result)} results for {count} tokens")
            self.out[end - count : end] = result
