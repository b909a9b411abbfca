"""Group relative policy optimisation done right: without the two biases of its divisions."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, AnyReduction, Baseline, KLConfig
from quartet.config.base import Count


class DrGRPO(Algorithm):
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), without a critic: divided by no deviation and by no response's
    length, so that its gradient is that of leave-one-out times (G - 1) / G, with G responses to a prompt."""

    kind: Literal["dr-grpo"] = "dr-grpo"
    """A response's reward less the mean of all responses to its prompt; no critic."""
    samples_per_prompt: Count = 8
    baseline: Baseline = "group"
    reduction: AnyReduction = "constant"
    kl: KLConfig = KLConfig(coef=0, placement="loss", estimator="k3")
