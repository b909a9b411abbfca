"""REINFORCE++: rewards to go against the mean of the batch."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, Baseline, Scale


class ReinforcePP(Algorithm):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), without a critic."""

    kind: Literal["reinforce++"] = "reinforce++"
    """The rewards to go, whitened over the batch, whose mean is the baseline; no critic."""
    baseline: Baseline = "batch"
    scale: Scale = "batch"
