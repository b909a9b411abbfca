"""Group relative policy optimisation: a response against the mean of all responses to its prompt."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, AnyReduction, Baseline, KLConfig, Scale
from quartet.config.base import Count


class GRPO(Algorithm):
    """GRPO (Shao et al. 2024, arXiv:2402.03300), without a critic. As published it has a KL penalty in the loss, by
    k3 with coefficient 0.04; most runs of today have none."""

    kind: Literal["grpo"] = "grpo"
    """A response's reward less the mean of all responses to its prompt, over their deviation; no critic."""
    samples_per_prompt: Count = 8
    baseline: Baseline = "group"
    scale: Scale = "group"
    reduction: AnyReduction = "trajectories"
    kl: KLConfig = KLConfig(coef=0, placement="loss", estimator="k3")
