"""Clipped importance weights of the policy's gradient, from which no token drops out."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, Baseline, Clip, KLConfig, Scale
from quartet.config.base import Count


class CISPO(Algorithm):
    """CISPO (MiniMax-M1, 2025, arXiv:2506.13585), without a critic, with the bound of ScaleRL (arXiv:2510.13786)."""

    kind: Literal["cispo"] = "cispo"
    """A response's reward less the mean of all responses to its prompt, over their deviation; the ratio, up to a cap,
    is a weight of each token's gradient; no critic."""
    samples_per_prompt: Count = 8
    baseline: Baseline = "group"
    scale: Scale = "group"
    clip: Clip = "cispo"
    kl: KLConfig = KLConfig(coef=0, placement="loss", estimator="k3")
