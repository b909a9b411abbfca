"""Passes of a model that is not trained, over pairs of any lengths."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from quartet.models.sequences import PairTensors, enough_tokens, length_batches, packed_batches, pair_tensors
from quartet.wire.codec import Floats, Ints


class TokenPair(Protocol):
    """A prompt and its response, as ids."""

    @property
    def prompt_ids(self) -> Ints:
        """Token ids, [P]."""

    @property
    def response_ids(self) -> Ints:
        """Token ids, [T]."""


class FrozenPasses:
    """Divides pairs into passes, padded or packed; in a packed one a prompt that several pairs share is computed
    once."""

    def __init__(self, max_tokens: int, device: torch.device, *, packing: bool, last: bool) -> None:
        """
        Args:
            max_tokens: most tokens of a pass; a single pair that is longer makes a pass of its own.
            device: the model's first device.
            packing: True if the model takes packed pairs.
            last: True if the model has to see the last token of each response.
        """
        self._max_tokens, self._device, self._packing, self._last = max_tokens, device, packing, last

    def run(
        self,
        compute: Callable[[PairTensors], Iterable[Floats]],
        pairs: Sequence[TokenPair],
        turn_steps: Sequence[Ints | None] = (),
    ) -> list[Floats]:
        """Calls `compute` for each pass; returns the array that it gave for each pair.

        Args:
            compute: the pass.
            pairs: prompts and responses.
            turn_steps: the index of each token of a response in its segment, [T]; None for a response that is one
                segment; nothing at all if each is.
        """
        prompts, responses = [pair.prompt_ids for pair in pairs], [pair.response_ids for pair in pairs]
        answers: list[Floats] = [np.empty(0, np.float32)] * len(pairs)
        for batch in self._batches(prompts, responses):
            some, their = [prompts[i] for i in batch], [responses[i] for i in batch]
            several = any(turn_steps[i] is not None for i in batch) if turn_steps else False
            tensors = pair_tensors(
                some,
                their,
                self._device,
                packing=self._packing,
                last=self._last,
                turn_steps=[_steps(turn_steps[i], responses[i]) for i in batch] if several else None,
            )
            for i, row in zip(batch, compute(tensors), strict=True):
                answers[i] = row
        return answers

    def _batches(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> Iterable[list[int]]:
        if self._packing:
            return packed_batches(prompts, responses, self._max_tokens, shared=True)
        return length_batches(prompts, responses, self._max_tokens, enough_tokens(self._device))


def _steps(steps: Ints | None, response: Ints) -> Ints:
    return np.arange(len(response), dtype=np.int32) if steps is None else steps
