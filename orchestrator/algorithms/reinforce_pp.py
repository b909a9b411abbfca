"""REINFORCE++: rewards to go against the mean of the batch."""

from typing import TYPE_CHECKING, Literal

from orchestrator.algorithms.contract import Algorithm, Credit
from quartet.config.base import Fraction

if TYPE_CHECKING:
    from orchestrator.algorithms.responses import Responses


class ReinforcePP(Algorithm):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), without a critic."""

    kind: Literal["reinforce++"] = "reinforce++"
    """The rewards to go, whitened over the batch, whose mean is the baseline; no critic."""
    gamma: Fraction = 1.0
    """Discount per token."""

    def credit(self, responses: "Responses") -> Credit:
        """The discounted rewards from each token to the end, whitened over the trained tokens of the batch."""
        return Credit(responses.whitened(responses.to_go(gamma=self.gamma)))
