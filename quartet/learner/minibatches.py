"""The order in which a batch is trained on, the weights of its minibatches, and the means of its metrics."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np


def minibatches(samples: int, *, epochs: int, size: int, seed: int) -> Iterator[list[int]]:
    """Indices of each minibatch. Every epoch (pass over the batch) is a new permutation; its last minibatch may be
    short.

    For example 5 samples, 2 epochs and size 2 give minibatches of 2, 2, 1, 2, 2 and 1 samples.
    """
    order = np.random.default_rng(seed)
    for _ in range(epochs):
        shuffled = order.permutation(samples).tolist()
        for start in range(0, samples, size):
            yield shuffled[start : start + size]


def weight_of(chosen: Sequence[int], lengths: Sequence[int], size: int) -> float:
    """Weight of a minibatch's mean over its tokens: its tokens divided by the mean number of tokens of a whole one.

    Each token of the batch then counts as much as any other, whatever minibatch it is in, and the gradients of an
    epoch's minibatches have the mean over all tokens of the batch as their mean, however the batch was divided. For
    example of 3 responses with 30, 10 and 20 tokens a whole minibatch of 2 has 40 tokens in the mean: 30 and 20 weigh
    1.25, and 10 alone 0.25. A batch that is one minibatch weighs 1.

    Args:
        chosen: indices of the minibatch's samples.
        lengths: tokens of every response of the batch that are trained on.
        size: samples of a whole minibatch.
    """
    whole = sum(lengths) * min(size, len(lengths)) / len(lengths)
    return sum(lengths[index] for index in chosen) / whole


class Means:
    """Running means of named numbers over optimizer steps, and maxima of those named `..._max`."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weight, self._skipped, self._empty = 0.0, 0, 0
        self.first: Mapping[str, float] = {}
        """The numbers of the first step that was taken."""

    def add(self, measured: Mapping[str, float], weight: float = 1.0) -> None:
        """Adds one step's numbers with their weight; an empty mapping stands for a skipped step."""
        if not measured:
            self._skipped += 1
            return
        self.first = self.first or measured
        self._weight += weight
        for name, value in measured.items():
            if name.endswith("_max"):
                self._totals[name] = max(self._totals.get(name, value), value)
            else:
                self._totals[name] = self._totals.get(name, 0.0) + weight * value

    def leave_out(self) -> None:
        """Counts a minibatch for which no step was tried, as none of its tokens is trained on."""
        self._empty += 1

    def result(self) -> dict[str, float]:
        """Each number by name over the steps that were taken; `skipped_steps`, the number of skipped steps; and
        `empty_steps`, the number of minibatches that were left out, if there were any."""
        means = {
            name: total if name.endswith("_max") else total / self._weight for name, total in self._totals.items()
        }
        empty = {"empty_steps": float(self._empty)} if self._empty else {}
        return means | {"skipped_steps": float(self._skipped)} | empty
