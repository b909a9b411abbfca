"""Group relative policy optimisation: a response against the mean of all responses to its prompt."""

from typing import TYPE_CHECKING, Literal

from orchestrator.algorithms.contract import Algorithm, Credit, Group
from quartet.config.base import Count
from quartet.learner.reductions import Reduction

if TYPE_CHECKING:
    from orchestrator.algorithms.responses import Responses

EPS = 1e-6  # added to a deviation, so that equal rewards give no advantage


class GRPO(Algorithm):
    """GRPO (Shao et al. 2024, arXiv:2402.03300), without a critic; by its settings Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783), and the dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476)."""

    needs_samples_per_prompt = 2

    kind: Literal["grpo"] = "grpo"
    """A response's reward less the mean of all responses to its prompt, over their deviation; no critic."""
    samples_per_prompt: Count = 8
    """Responses to each prompt of a batch; batch_size counts responses and must be a multiple of it."""
    reduction: Reduction = "trajectories"
    """Mean of the policy's losses over a minibatch, as for every kind. trajectories, as published: each response
    counts the same. DAPO has tokens, Dr. GRPO a number."""
    divide_by_deviation: bool = True
    """Divide by the standard deviation of the prompt's rewards, as published. False, as in Dr. GRPO: prompts of which
    nearly all or nearly no responses are right then weigh no more than others."""
    discard_equal: bool = False
    """Discard a prompt whose responses all have the same score, which teaches nothing, and take another prompt in its
    place, as DAPO does."""
    max_discarded: Count = 9
    """Most groups that are discarded in a step for each one of its batch; the run then ends with an error, as the
    prompts are all too easy or too hard."""

    @property
    def discard_limit(self) -> int:
        """The setting, where groups are discarded at all."""
        return self.max_discarded if self.discard_equal else 0

    def admit(self, group: Group) -> bool:
        """True unless all scores are the same and such groups are discarded."""
        return not self.discard_equal or bool((group.scores != group.scores[0]).any())

    def credit(self, responses: "Responses") -> Credit:
        """A response is one action with the reward R_i, the sum over its tokens. A_i = R_i - the mean of all R of its
        prompt, over their unbiased standard deviation, at all its tokens. With R = 1, 2, 6 the mean is 3, the
        deviation 2.65, and A = -0.76, -0.38, 1.13, or -2, -1, 3 without the division."""
        totals = responses.outcomes(self.samples_per_prompt)
        centred = totals - totals.mean(dim=1, keepdim=True)
        if self.divide_by_deviation:
            centred = centred / (totals.std(dim=1, keepdim=True) + EPS)
        return Credit(responses.at_all_tokens(centred))
