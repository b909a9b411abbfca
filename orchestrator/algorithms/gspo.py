"""Group sequence policy optimisation: one ratio for a whole response."""

from typing import Literal

from pydantic import PositiveFloat

from orchestrator.algorithms.contract import Algorithm, AnyReduction, Baseline, BelowOne, KLConfig, Ratio, Scale
from quartet.config.base import Count


class GSPO(Algorithm):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071), without a critic."""

    kind: Literal["gspo"] = "gspo"
    """A response's reward less the mean of all responses to its prompt, over their deviation, with the geometric mean
    of its tokens' ratios clipped closely; no critic."""
    samples_per_prompt: Count = 8
    baseline: Baseline = "group"
    scale: Scale = "group"
    ratio: Ratio = "sequence"
    clip_eps_low: BelowOne = 3e-4
    clip_eps_high: PositiveFloat = 4e-4
    reduction: AnyReduction = "trajectories"
    kl: KLConfig = KLConfig(coef=0, placement="loss", estimator="k3")
