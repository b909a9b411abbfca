"""The responses of a batch as an algorithm gives them credit."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from orchestrator.algorithms.advantages import gae, length_lambdas, rewards_to_go, whiten
from orchestrator.algorithms.groups import compared
from orchestrator.algorithms.rewards import at_own_tokens, carry_back
from quartet.models.numerics import masked_mean


@dataclass(frozen=True)
class Responses:
    """B responses of at most T tokens, right-padded. All but `groups` are [B, T]."""

    rewards: Tensor
    """Reward of each token: the KL penalty if rewards hold it, and the score at the last. Zero off `sampled`."""
    sampled: Tensor
    """True at response tokens."""
    mask: Tensor
    """True at those that are trained on."""
    values: Tensor | None
    """The critic's values before the update; None without a critic."""
    groups: Tensor
    """Number of each response's group, the responses to one prompt that are compared: [B] int64."""
    parts: Tensor | None = None
    """The parts of the scores at the tokens that earned them, such as the last of a turn; None without."""

    @cached_property
    def earned(self) -> Tensor:
        """The rewards where they are earned: parts of a score at their own tokens, and what tokens have that are not
        trained on at the last trained token before them."""
        rewards = self.rewards if self.parts is None else at_own_tokens(self.rewards, self.parts, self.sampled)
        if bool((self.sampled == self.mask).all()):
            return rewards
        return carry_back(rewards, self.sampled, self.mask)

    def gae(self, *, gamma: float, gae_lambda: float | Tensor) -> tuple[Tensor, Tensor]:
        """Generalised advantages and returns from the critic's values, see `advantages.gae`."""
        assert self.values is not None
        return gae(self.earned, self.values, self.mask, gamma=gamma, gae_lambda=gae_lambda)

    def length_lambdas(self, alpha: float) -> Tensor:
        """A lambda for each response by its length, [B], see `advantages.length_lambdas`."""
        return length_lambdas(self.mask, alpha=alpha)

    def to_go(self, *, gamma: float) -> Tensor:
        """The discounted rewards from each token to the end, see `advantages.rewards_to_go`."""
        return rewards_to_go(self.earned, self.mask, gamma=gamma)

    @property
    def totals(self) -> Tensor:
        """Each response as one action: the sum of its rewards, also of tokens that are not trained on, [B]."""
        return torch.where(self.sampled, self.rewards, 0.0).sum(dim=1)

    def compared(self, *, leave_one_out: bool, divide: bool) -> Tensor:
        """Each response's total in the comparison of its group, [B], see `groups.compared`."""
        return compared(self.totals, self.groups, leave_one_out=leave_one_out, divide=divide)

    def at_all_tokens(self, numbers: Tensor) -> Tensor:
        """One number for each response, [B], at all its tokens that are trained on: [B, T]."""
        return torch.where(self.mask, numbers.unsqueeze(1), 0.0)

    def centred(self, advantages: Tensor) -> Tensor:
        """The advantages less their mean over the trained tokens; zeros if there is none."""
        if not bool(self.mask.any()):
            return torch.zeros_like(advantages)
        return torch.where(self.mask, advantages - masked_mean(advantages, self.mask), 0.0)

    def whitened(self, advantages: Tensor) -> Tensor:
        """The advantages with zero mean and unit variance over the trained tokens, see `advantages.whiten`; a single
        token has no spread, so that its advantage is 0."""
        return whiten(advantages, self.mask) if int(self.mask.sum()) > 1 else torch.zeros_like(advantages)
