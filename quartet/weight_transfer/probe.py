"""Proof of a push by a few fixed sequences: a replica's log-probs of them are compared with the learner's.

Checksums prove only that the bytes arrived, not that the replica computes with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos import rollout_pb2 as pb
from quartet.wire.codec import Floats, Ints, split, unpack_floats

COUNT, LENGTH = 2, 16


@dataclass(frozen=True, slots=True)
class Probe:
    """The sequences that a replica scores after a push, and the log-probs that it should give."""

    sequences: list[Ints]
    """Token ids, each [T]."""
    expected: list[Floats]
    """The learner's log-probs of all tokens but the first, over the model's whole vocabulary; each [T - 1]."""
    tolerance: float
    """Largest mean absolute difference, as a part of `spread`."""

    @property
    def spread(self) -> float:
        """The unit of differences, in nats: the standard deviation of the expected log-probs, and at least 1.
        Rounding grows with it, since both grow with the logits."""
        return max(1.0, float(np.concatenate(self.expected).std()))

    def measure(self, logprobs: Sequence[Floats]) -> float:
        """Mean absolute difference of a replica's log-probs from those expected, as a part of `spread`."""
        return float(self._differences(logprobs).mean()) / self.spread

    def disagreement(self, logprobs: Sequence[Floats], stale: Sequence[str] = ()) -> str:
        """Describes how a replica's log-probs differ; empty if it computes with the pushed weights.

        Args:
            logprobs: the replica's log-probs, in the form of `expected`.
            stale: names of the weights that the replica knows it did not receive.
        """
        measured = self.measure(logprobs)
        if measured <= self.tolerance:  # false for NaN
            return ""
        differences = self._differences(logprobs)
        return (
            "computes with other weights than were pushed: "
            f"log-probs of {len(differences)} fixed tokens differ from the learner's by {differences.mean():.3g} "
            f"nats in the mean and {differences.max():.3g} at most; the mean is {measured:.3g} of their spread, "
            f"tolerance {self.tolerance:.3g}; " + _advice(measured, stale)
        )

    def _differences(self, logprobs: Sequence[Floats]) -> Floats:
        differences: Floats = np.abs(np.concatenate(list(logprobs)) - np.concatenate(self.expected))
        return differences


def _advice(measured: float, stale: Sequence[str]) -> str:
    if stale:
        return f"these got no weights: {', '.join(stale)}"
    if not np.isfinite(measured):
        return "some are not finite"
    return "if engine and learner only round so differently, raise weights.prove_tolerance"


def scores_of(report: pb.WeightReport, sequences: Sequence[Ints]) -> list[Floats]:
    """The log-probs that a replica reports of these sequences, in the form of `Probe.expected`. InvalidArgument if
    they are not as many."""
    return split(unpack_floats(report.logprobs, "logprobs"), [len(row) - 1 for row in sequences], "logprobs")


def probe_sequences(vocabulary: int, max_length: int) -> list[Ints]:
    """The probe's sequences: ids below `vocabulary`, fewer than `max_length`, and the same for every run of a
    model."""
    draw = np.random.default_rng(0)
    length = max(2, min(LENGTH, max_length - 1))
    return [draw.integers(0, vocabulary, length).astype(np.int32) for _ in range(COUNT)]
