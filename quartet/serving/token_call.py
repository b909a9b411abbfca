"""A batcher's view of a call that asks for one number per sampled token."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from quartet.columns import Columns
from quartet.wire.codec import Floats, Ints

Item = TypeVar("Item")


class TokenCall(Generic[Item]):
    """B trajectories, and a number for each sampled token."""

    def __init__(self, trajectories: Columns, make: Callable[[Ints, Ints, Ints | None], Item]) -> None:
        """
        Args:
            trajectories: those of the call.
            make: makes the model's input from a prompt, its response, in which the model computes every token, and
                the `turn_steps` of that.
        """
        self._trajectories, self._make = trajectories, make
        self._prompts, self._responses = trajectories.prompts, trajectories.responses
        self._steps = trajectories.turn_steps
        self.costs = trajectories.lengths
        self._computed: Floats = np.empty(len(self._responses.ids), np.float32)

    @property
    def out(self) -> Floats:
        """[M] the results, all trajectories end to end."""
        return self._computed[self._trajectories.response_mask]

    def items(self, rows: Sequence[int]) -> list[Item]:
        """The model's inputs for these rows."""
        steps = self._steps
        return [self._make(self._prompts[row], self._responses[row], steps[row] if steps else None) for row in rows]

    def put(self, rows: Sequence[int], results: Sequence[Floats]) -> None:
        """Stores the model's numbers for these rows, each [T]."""
        for row, result in zip(rows, results, strict=True):
            start, end = self._responses.bounds(row)
            if len(result) != end - start:
                raise RuntimeError(f"{len(result)} results for {end - start} tokens")
            self._computed[start:end] = result
