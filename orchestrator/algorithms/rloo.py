"""REINFORCE leave-one-out: a response against the others to its prompt."""

from typing import TYPE_CHECKING, Literal

from orchestrator.algorithms.contract import Algorithm, Credit
from quartet.config.base import Count

if TYPE_CHECKING:
    from orchestrator.algorithms.responses import Responses


class RLOO(Algorithm):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740), without a critic."""

    needs_samples_per_prompt = 2

    kind: Literal["rloo"] = "rloo"
    """A response's reward less the mean of the other responses to its prompt; no critic."""
    samples_per_prompt: Count = 4
    """Responses to each prompt of a batch; batch_size counts responses and must be a multiple of it."""
    whiten_advantages: bool = True
    """Zero mean and unit variance over all response tokens of the batch. False, as published: the advantages as they
    are."""

    def credit(self, responses: "Responses") -> Credit:
        """A response is one action with the reward R_i, the sum over its tokens, and A_i = R_i - the mean of the
        other R_j, at all its tokens. With R = 1, 2, 6 the means are 4, 3.5, 1.5 and A = -3, -1.5, 4.5."""
        totals = responses.outcomes(self.samples_per_prompt)
        others = (totals.sum(dim=1, keepdim=True) - totals) / (self.samples_per_prompt - 1)
        advantages = responses.at_all_tokens(totals - others)
        return Credit(responses.whitened(advantages) if self.whiten_advantages else advantages)
