"""Passes of a model that is not trained, over pairs of any lengths."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from quartet.config.base import ConfigError
from quartet.models.attention import packed
from quartet.models.attention.prefixes import Past, Prefix, Prefixes
from quartet.models.sequences import (
    PairTensors,
    concatenate_pairs,
    enough_tokens,
    length_batches,
    packed_batches,
    pad_pairs,
)
from quartet.wire.codec import Floats, Ints


class Pair(Protocol):
    """A prompt and its response, or as much of the response as there is."""

    @property
    def prompt_ids(self) -> Ints:
        """Token ids, [P]."""

    @property
    def response_ids(self) -> Ints:
        """Token ids, [T]."""

    @property
    def unfinished(self) -> bool:
        """True if more tokens of the response will be asked for later."""


class FrozenPasses:
    """Divides pairs into passes, padded or packed, and continues those that have begun in an earlier call."""

    def __init__(
        self,
        model: Any,
        max_tokens: int,
        device: torch.device,
        *,
        packing: bool,
        last: bool,
        kept_tokens: int = 0,
    ) -> None:
        """
        Args:
            model: the transformers model that the passes are for.
            max_tokens: most tokens of a pass; a single pair that is longer makes a pass of its own.
            device: the model's first device.
            packing: True if the model takes packed pairs.
            last: True if the model has to see the last token of each response.
            kept_tokens: most tokens whose keys and values are kept for unfinished pairs; above 0 only with packing.

        Raises:
            ConfigError: the model's keys and values cannot be kept.
        """
        if kept_tokens and not packed.continues(model):
            kind = model.config.model_type
            raise ConfigError(f"kept_tokens: layers of {kind} attend more than once; set kept_tokens to 0")
        self._max_tokens, self._device, self._packing, self._last = max_tokens, device, packing, last
        self._prefixes = Prefixes(kept_tokens)

    def run(
        self, compute: Callable[[PairTensors], Iterable[Floats]], pairs: Sequence[Pair], key: Hashable = None
    ) -> list[Floats]:
        """Calls `compute` for each pass; returns the array that it gave for each pair. A pair that was unfinished in
        an earlier call with the same key is continued: its array is the earlier one, followed by that of the tokens
        which were not there then."""
        keys = [(key, pair.prompt_ids.tobytes()) for pair in pairs]
        whole = [np.concatenate([pair.prompt_ids, pair.response_ids]) for pair in pairs]
        begun: list[Prefix | None] = [None] * len(pairs)
        for i in sorted(
            range(len(pairs)), key=lambda i: pairs[i].unfinished
        ):  # whole responses have the first choice
            begun[i] = self._prefixes.take(keys[i], whole[i])
        rests = [_rest(pair, ids, prefix) for pair, ids, prefix in zip(pairs, whole, begun, strict=True)]
        answers: list[Floats] = [np.empty(0, np.float32)] * len(pairs)
        for batch in self._batches([prompt for prompt, _ in rests], [response for _, response in rests]):
            before, kept = [begun[i] for i in batch], [pairs[i].unfinished for i in batch]
            past = Past(before, kept) if any(kept) or any(before) else None
            rows = compute(self._tensors([rests[i] for i in batch], past))
            for at, (i, row) in enumerate(zip(batch, rows, strict=True)):
                prefix = begun[i]
                answers[i] = np.concatenate([prefix.answers, row]) if prefix else row
                begun[i] = None
                if past and kept[at]:
                    self._prefixes.keep(
                        keys[i], Prefix(whole[i], len(pairs[i].prompt_ids), past.layers[at], answers[i])
                    )
        return answers

    def _batches(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> Iterable[list[int]]:
        if self._packing:
            return packed_batches(prompts, responses, self._max_tokens)
        return length_batches(prompts, responses, self._max_tokens, enough_tokens(self._device))

    def _tensors(self, pairs: Sequence[tuple[Ints, Ints]], past: Past | None) -> PairTensors:
        prompts, responses = [prompt for prompt, _ in pairs], [response for _, response in pairs]
        if self._packing:
            return concatenate_pairs(prompts, responses, self._device, last=self._last, past=past)
        return pad_pairs(prompts, responses, self._device, last=self._last)


def _rest(pair: Pair, whole: Ints, prefix: Prefix | None) -> tuple[Ints, Ints]:
    """Prompt and response without what a prefix holds: its last token is the prompt of the tokens that follow it."""
    if prefix is None:
        return pair.prompt_ids, pair.response_ids
    count = len(prefix.ids)
    return whole[count - 1 : count], whole[count:]
