"""Sequences that go on later: their keys and values are kept, so that the next pass computes only what follows."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quartet.wire.codec import Floats, Ints

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, each [1, groups, N, D]."""


MOST_ALIKE = 256
"""Most prefixes of one key: they are compared one by one."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first N tokens of a prompt and its response, and what a model has computed of them."""

    ids: Ints
    """[N], the prompt's and then the response's."""
    prompt_length: int
    """Tokens of the prompt."""
    layers: dict[int, Layer]
    """Keys and values of the tokens before the last one, or of more, by the number of the layer."""
    answers: Floats
    """The model's numbers for the response's tokens."""

    def cut(self, count: int) -> "Prefix":
        """The first `count` tokens."""
        layers = {
            at: (keys[:, :, : count - 1], values[:, :, : count - 1]) for at, (keys, values) in self.layers.items()
        }
        answers = self.answers[: count - self.prompt_length]
        return replace(self, ids=self.ids[:count], layers=layers, answers=answers)


class Prefixes:
    """Prefixes of at most so many tokens in all; the oldest leave first."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._kept: dict[Hashable, list[Prefix]] = {}
        self.tokens = 0
        """Tokens of all prefixes."""

    def keep(self, key: Hashable, prefix: Prefix) -> None:
        """Keeps it for the next sequence of this key that begins with it, unless it is longer than all may be."""
        if len(prefix.ids) > self._most:
            return
        if len(self._kept.get(key, ())) >= MOST_ALIKE:
            self._remove(key, 0)
        # Behind all others: dictionaries have their entries in the order in which they were added.
        self._kept[key] = [*self._kept.pop(key, []), prefix]
        self.tokens += len(prefix.ids)
        while self.tokens > self._most:
            self._remove(next(iter(self._kept)), 0)

    def take(self, key: Hashable, ids: Ints) -> Prefix | None:
        """Gives away the prefix of this key that has most of the first tokens in common with `ids`, cut to these and
        to fewer than `ids` has.

        None if there is none that shares half of its response: a prefix with another response is likely that of
        another sample of the same prompt, which will ask for it.
        """
        begun = self._kept.get(key, [])
        shared = [_shared(prefix.ids, ids[:-1]) for prefix in begun]
        own = [count for count, prefix in zip(shared, begun, strict=True) if _is_own(prefix, count)]
        if not own:
            return None
        return self._remove(key, shared.index(max(own))).cut(max(own))

    def _remove(self, key: Hashable, at: int) -> Prefix:
        removed = self._kept[key].pop(at)
        self.tokens -= len(removed.ids)
        if not self._kept[key]:
            del self._kept[key]
        return removed


class Past:
    """Keys and values of the sequences of one packed row: of their prefixes, and those that a pass adds."""

    def __init__(self, prefixes: Sequence[Prefix | None], kept: Sequence[bool]) -> None:
        """
        Args:
            prefixes: of each sequence in the row; None for one that begins in it.
            kept: True for each sequence whose keys and values are needed later.
        """
        self._before = [prefix.layers if prefix else {} for prefix in prefixes]
        self.starts = [len(prefix.ids) - 1 if prefix else 0 for prefix in prefixes]
        """Position of each sequence's first token in the row: the last one of its prefix is computed again, since
        what follows it is predicted from it."""
        self.steps = [len(prefix.ids) - prefix.prompt_length if prefix else 0 for prefix in prefixes]
        """Tokens of each sequence's response that are in its prefix."""
        self._keeps = kept
        self._met: list[set[int]] = [set() for _ in prefixes]
        self.layers: list[dict[int, Layer]] = [{} for _ in prefixes]
        """Keys and values of each whole sequence that is kept, once the pass has ended."""

    def extended(self, sequence: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """The keys and values of a whole sequence from those of its tokens in the row, each [1, groups, L, D].
        RuntimeError if the layer was asked about before: the keys and values of both cannot be told apart."""
        if layer in self._met[sequence]:
            raise RuntimeError(f"kept_tokens: layer {layer} of this architecture attends more than once")
        self._met[sequence].add(layer)
        if before := self._before[sequence].get(layer):
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        elif self._keeps[sequence]:
            keys, values = keys.clone(), values.clone()  # as the row's would stay with it
        if self._keeps[sequence]:
            self.layers[sequence][layer] = keys, values
        return keys, values


def _is_own(prefix: Prefix, shared: int) -> bool:
    # A last token is computed again in any case, so that of a response of one token nothing need be shared.
    return 2 * (shared - prefix.prompt_length) >= len(prefix.ids) - prefix.prompt_length - 1


def _shared(some: Ints, others: Ints) -> int:
    """Number of first tokens that are equal."""
    count = min(len(some), len(others))
    differ = np.flatnonzero(some[:count] != others[:count])
    return int(differ[0]) if len(differ) else count
