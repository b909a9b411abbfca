"""Decoupled clip and dynamic sampling."""

from typing import Literal

from pydantic import PositiveFloat

from orchestrator.algorithms.contract import Algorithm, Baseline, KLConfig, Scale, ZeroVariance
from quartet.config.base import Count


class DAPO(Algorithm):
    """DAPO (Yu et al. 2025, arXiv:2503.14476), without a critic. Its fourth part, a score that falls towards the
    length limit, is set by overlong_buffer, a fifth of the longest response there."""

    kind: Literal["dapo"] = "dapo"
    """A response's reward less the mean of all responses to its prompt, over their deviation; more room for tokens
    to become likelier, prompts whose responses all score the same replaced, and a loss per token; no critic."""
    samples_per_prompt: Count = 16
    baseline: Baseline = "group"
    scale: Scale = "group"
    clip_eps_high: PositiveFloat = 0.28
    zero_variance: ZeroVariance = "resample"
    kl: KLConfig = KLConfig(coef=0, placement="loss", estimator="k3")
