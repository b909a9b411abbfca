"""On-policy distillation: the reference service is the teacher."""

from typing import Literal

from pydantic import NonNegativeFloat

from orchestrator.algorithms.contract import Algorithm, KLConfig
from quartet.config.base import Fraction


class Distil(Algorithm):
    """On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649; Thinking Machines Lab, 2025), without a critic:
    the expected gradient is that of KL(policy || teacher) of the next token, on the policy's own samples. The teacher
    is the model of the reference service, with the policy's tokenizer; scores are measured and have no effect."""

    kind: Literal["distil"] = "distil"
    """A token's advantage is the teacher's log-prob less the policy's own; no critic."""
    gamma: Fraction = 0.0
    score_weight: NonNegativeFloat = 0.0
    kl: KLConfig = KLConfig(coef=1)
