"""Supervised fine-tuning: the likelihood of given answers."""

from dataclasses import dataclass, field
from typing import Any

from quartet.learner.objective import Micro, Objective, Terms
from quartet.learner.reductions import Reduction
from quartet.models.distribution import Distribution


@dataclass(frozen=True)
class Likelihood(Objective):
    """The negative log-likelihood of each trajectory's sampled tokens, in nats. The model is one of `load_causal`; an
    answer that a person wrote is marked as sampled, and its prompt as given."""

    distribution: Distribution = field(default_factory=Distribution)
    """The distribution in which log-probs are taken."""
    reduction: Reduction = "tokens"

    def __call__(self, model: Any, micro: Micro) -> Terms:
        """`loss`, and `nll`, the mean over tokens whatever the reduction."""
        logprobs, _ = self.distribution.asked_of(model, micro.pairs)
        loss = -micro.reduced(logprobs)
        return Terms(loss, {"loss": loss, "nll": -micro.mean(logprobs)})
