"""Proximal policy optimisation: advantages from a critic's values."""

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from orchestrator.algorithms.contract import Algorithm, Credit
from quartet.config.base import Count, Fraction

if TYPE_CHECKING:
    from orchestrator.algorithms.responses import Responses


class PPO(Algorithm):
    """PPO (Schulman et al. 2017, arXiv:1707.06347) with generalised advantages (arXiv:1506.02438)."""

    needs_critic = True

    kind: Literal["ppo"] = "ppo"
    """Advantages from the values of a critic, which the run trains beside the policy."""
    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: Fraction = 0.95
    """Bias against variance in generalised advantage estimation."""
    gae_lambda_alpha: PositiveFloat | None = None
    """Takes the policy's lambda from a response's length: 1 - 1 / (alpha T), at least 0, for T tokens, so that the
    score reaches the first tokens of a long response as well as of a short one. 1.5 in SAO. Null: gae_lambda."""
    critic_gae_lambda: Fraction | None = None
    """Lambda of the returns that the critic learns. 1, as in SAO: what was earned, without the critic's own values.
    Null: gae_lambda."""
    critic_epochs: Count | None = None
    """Passes over each batch for the critic, if others than `epochs`: more let it keep up with the policy. With
    minibatches of a whole batch, 2 are two critic updates to each policy update, as in SAO. Null: as `epochs`."""
    whiten_advantages: bool = True
    """Zero mean and unit variance over all response tokens of the batch."""

    @property
    def epochs_of_critic(self) -> int:
        """Passes over each batch for the critic."""
        return self.critic_epochs or self.epochs

    def credit(self, responses: "Responses") -> Credit:
        """Advantages and returns, each with a lambda of its own where one is configured (decoupled GAE: Yuan et al.
        2025, VC-PPO, arXiv:2503.01491; SAO, arXiv:2607.07508)."""
        alpha, of_critic = self.gae_lambda_alpha, self.critic_gae_lambda
        advantages, returns = responses.gae(gamma=self.gamma, gae_lambda=self.gae_lambda)
        if alpha is not None:
            advantages, _ = responses.gae(gamma=self.gamma, gae_lambda=responses.length_lambdas(alpha))
        if of_critic is not None:
            _, returns = responses.gae(gamma=self.gamma, gae_lambda=of_critic)
        return Credit(responses.whitened(advantages) if self.whiten_advantages else advantages, returns)
