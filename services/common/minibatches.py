"""The order in which a batch is trained on, and the means of what each step measured."""

from collections.abc import Iterator

import numpy as np


def minibatches(samples: int, *, epochs: int, size: int, seed: int) -> Iterator[list[int]]:
    """Indices of each minibatch: every epoch a new permutation, its last minibatch as short as it comes."""
    order = np.random.default_rng(seed)
    for _ in range(epochs):
        shuffled = order.permutation(samples).tolist()
        for start in range(0, samples, size):
            yield shuffled[start : start + size]


class Means:
    """Running means of named numbers, one set per optimizer step."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._steps = 0

    def add(self, measured: dict[str, float]) -> None:
        """One step's numbers."""
        self._steps += 1
        for name, value in measured.items():
            self._totals[name] = self._totals.get(name, 0.0) + value

    def result(self) -> dict[str, float]:
        """The mean of each over all steps."""
        return {name: total / self._steps for name, total in self._totals.items()}
