"""A batcher's view of a call for values."""

from collections.abc import Callable, Sequence

import numpy as np

from quartet.columns import Columns
from quartet.serving.token_call import TokenCall
from quartet.wire.codec import Ints


class ValuesCall(TokenCall[tuple[Ints, Ints]]):
    """Trajectories, and the critic's step at each pass, since it may be trained between two passes."""

    def __init__(self, trajectories: Columns, step: Callable[[], int]) -> None:
        """`step` returns the critic's step; it raises if the critic is not in a state that the caller accepts."""
        super().__init__(trajectories, lambda prompt, response, _: (prompt, response))
        self._step = step
        self.steps = np.zeros(len(trajectories), np.int64)
        """[B] the step whose weights computed the values of each trajectory."""

    def items(self, rows: Sequence[int]) -> list[tuple[Ints, Ints]]:
        """The model's inputs for these rows; raises the error of `step`."""
        self.steps[list(rows)] = self._step()
        return super().items(rows)
