"""A batcher's view of a call that asks for one number per response token."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from quartet.wire.codec import Floats, Ints
from quartet.wire.ragged import Ragged

Item = TypeVar("Item")


class TokenCall(Generic[Item]):
    """Pairs of prompt and response, and a number for each response token."""

    def __init__(self, prompts: Ragged, responses: Ragged, make: Callable[[Ints, Ints], Item]) -> None:
        """
        Args:
            prompts: token ids, B sequences.
            responses: token ids, B sequences.
            make: makes the model's input from a prompt and its response.
        """
        self._prompts, self._responses, self._make = prompts, responses, make
        self.costs = prompts.lengths + responses.lengths
        self.out: Floats = np.empty(len(responses.ids), np.float32)
        """[sum of T] the results, all responses end to end."""

    def items(self, rows: Sequence[int]) -> list[Item]:
        """The model's inputs for these rows."""
        return [self._make(self._prompts[row], self._responses[row]) for row in rows]

    def put(self, rows: Sequence[int], results: Sequence[Floats]) -> None:
        """Stores the model's numbers for these rows, each [T]."""
        for row, result in zip(rows, results, strict=True):
            start, end = self._responses.bounds(row)
            if len(result) != end - start:
                raise RuntimeError(f"{len(result)} results for {end - start} tokens")
            self.out[start:end] = result
