"""Weights by version, and how far the engine's log-probs are from those of the version that they are stamped with."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from quartet.wire.codec import Floats, Ints
from services.rollout.sample import Sample
from tests import plain


class Weights:
    """A model's weights, version by version: those of its folder, each parameter with noise of its own."""

    def __init__(self, folder: Path, change: float) -> None:
        self._change = change
        self._first = plain.language_model(folder)
        self.model = plain.language_model(folder)
        """The present version, and the source of pushes."""

    def set(self, version: int) -> None:
        """Makes this the present version."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for now, first in zip(self.model.parameters(), self._first.parameters(), strict=True):
                now.copy_(first + self._change * first.std() * torch.randn(first.shape, generator=generator))

    def logprobs(self, version: int, prompt: Ints, response: Ints) -> Floats:
        """Log-probs of a response under a version, [T]."""
        self.set(version)
        rows: list[Floats] = plain.logprobs(self.model, [prompt], [response])
        return rows[0]


@dataclass
class Distances:
    """|log-ratio| of tokens: of the engine to the weights by which each is stamped."""

    after: list[float] = field(default_factory=list)
    """Distances of tokens that follow one of other weights."""
    others: list[float] = field(default_factory=list)
    versions: list[float] = field(default_factory=list)
    """The same tokens as in `after`: of the version before to their own."""

    def add(self, weights: Weights, prompt: Ints, sample: Sample) -> None:
        """Compares a response."""
        before: Floats | None = None
        for version, start, end in sample.spans:
            own = weights.logprobs(version, prompt, sample.response_ids)
            distance = np.abs(sample.logprobs - own)[start:end].tolist()
            (self.others if before is None else self.after).extend(distance)
            if before is not None:
                self.versions.extend(np.abs(before - own)[start:end].tolist())
            before = own
