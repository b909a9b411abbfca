"""The variant of REINFORCE++ that compares responses to one prompt."""

from typing import Literal

from orchestrator.algorithms.contract import Algorithm, Baseline, KLConfig, Scale
from quartet.config.base import Count


class ReinforcePPBaseline(Algorithm):
    """REINFORCE++ with a group's mean as the baseline (Hu et al. 2025, arXiv:2501.03262), without a critic; the KL
    penalty is in the loss, with OpenRLHF's usual coefficient."""

    kind: Literal["reinforce++-baseline"] = "reinforce++-baseline"
    """A response's reward less the mean of all responses to its prompt, whitened over the batch; no critic."""
    samples_per_prompt: Count = 8
    baseline: Baseline = "group"
    scale: Scale = "batch"
    kl: KLConfig = KLConfig(coef=0.01, placement="loss", estimator="k2")
