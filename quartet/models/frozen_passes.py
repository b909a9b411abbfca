"""Passes of a model that is not trained, over trajectories of any lengths."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from quartet.columns import Columns
from quartet.models.sequences import PairTensors, enough_tokens, length_batches, packed_batches, pair_tensors
from quartet.wire.codec import Floats, Ints


class FrozenPasses:
    """Divides trajectories into passes, padded or packed; in a packed one a prompt that several share is computed
    once."""

    def __init__(self, max_tokens: int, device: torch.device, *, packing: bool, last: bool) -> None:
        """
        Args:
            max_tokens: most tokens of a pass; a single trajectory that is longer makes a pass of its own.
            device: the model's first device.
            packing: True if the model takes packed trajectories.
            last: True if the model has to see the last token of each trajectory.
        """
        self._max_tokens, self._device, self._packing, self._last = max_tokens, device, packing, last

    def run(self, compute: Callable[[PairTensors], Iterable[Floats]], trajectories: Columns) -> list[Floats]:
        """Calls `compute` for each pass; returns the array that it gave for each trajectory."""
        bare = trajectories.select()
        answers: list[Floats] = [np.empty(0, np.float32)] * len(bare)
        for batch in self._batches(bare.prompts, bare.responses):
            tensors = pair_tensors(bare.take(batch), self._device, packing=self._packing, last=self._last)
            for i, row in zip(batch, compute(tensors), strict=True):
                answers[i] = row
        return answers

    def _batches(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> Iterable[list[int]]:
        if self._packing:
            return packed_batches(prompts, responses, self._max_tokens, shared=True)
        return length_batches(prompts, responses, self._max_tokens, enough_tokens(self._device))
