"""REINFORCE leave-one-out: a response against the others to its prompt."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, Baseline
from quartet.config.base import Count


class RLOO(Algorithm):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740), without a critic."""

    kind: Literal["rloo"] = "rloo"
    """A response's reward less the mean of the other responses to its prompt; no critic."""
    samples_per_prompt: Count = 4
    baseline: Baseline = "leave-one-out"
