"""The contract of an algorithm: its needs, the groups that it admits, the credit that it gives, and its settings.

A new one is a class in a file beside this one and a row in `registry`; each setting has a docstring, which the user
reads:

    class Centred(Algorithm):

        needs_samples_per_prompt = 2

        kind: Literal["centred"] = "centred"
        samples_per_prompt: Count = 8
        scale: PositiveFloat = 1.0

        def credit(self, responses: "Responses") -> Credit:
            outcomes = responses.outcomes(self.samples_per_prompt)
            centred = outcomes - outcomes.mean(dim=1, keepdim=True)
            return Credit(responses.at_all_tokens(self.scale * centred))

Loop, configuration, checks and `quartet init` read everything else from it.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from quartet.config.base import Config, Count
from quartet.learner.reductions import Reduction
from quartet.wire.codec import Bools, Floats, Ints

if TYPE_CHECKING:  # torch takes a second that an error in a file need not wait for
    from torch import Tensor

    from orchestrator.algorithms.responses import Responses

CLIP_EPS, IMPORTANCE_CAP = 0.2, 2.0
"""Defaults of Algorithm.clip_eps_low and clip_eps_high, and of importance_cap."""
BANDED = ("icepop", "geometric", "dis")
"""Corrections by a band of ratios; the others cap their weights."""


class KLConfig(Config):
    """The penalty that keeps the policy near the reference."""

    coef: NonNegativeFloat = 0.1
    """Coefficient of the penalty; the initial one if `target` is set. 0 turns the penalty off."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimator of KL(policy || reference) from samples of the policy, which kl/reference reports as well.
    In the reward only k1 pulls to the reference, in the loss only k2 and k3 do. With coef 0 any can be measured."""
    placement: Literal["reward", "loss"] = "reward"
    """Subtract it from each token's reward (k1), or add it to the policy's loss (k2, k3). The two are not the same
    penalty, and a coefficient of one does not carry over to the other; see docs/algorithm.md."""
    target: PositiveFloat | None = None
    """Adapt the coefficient towards this KL per response, in nats (Ziegler et al. 2019). Null keeps it fixed."""
    horizon: PositiveFloat = 10_000
    """Samples over which the adaptive coefficient reacts."""

    @model_validator(mode="after")
    def _estimator_pulls_to_the_reference(self) -> Self:
        if self.coef == 0:
            return self
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError("estimator k1 in the loss has an expected gradient of zero; choose k2 or k3")
        if self.placement == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator {self.estimator} in the reward does not pull to the reference, as a reward is not "
                "differentiated; choose k1, or placement loss"
            )
        return self

    @model_validator(mode="after")
    def _zero_stays_zero(self) -> Self:
        if self.target is not None and self.coef == 0:
            raise ValueError("target adapts the coefficient by factors, so coef must be more than 0")
        return self


@dataclass(frozen=True, slots=True)
class Group:
    """All G responses to one prompt, as an algorithm decides on them before a batch takes them."""

    scores: Floats
    """[G]"""
    lengths: Ints
    """Tokens of each response, [G]."""
    truncated: Bools
    """True where the length limit cut the response off, [G]."""


class Credit(NamedTuple):
    """The credit of B responses of at most T tokens."""

    advantages: "Tensor"
    """[B, T], zero at tokens that are not trained on."""
    returns: "Tensor | None" = None
    """Targets of the critic, [B, T], zero at the same tokens; None without a critic."""


class Algorithm(Config):
    """The settings that all algorithms share; each adds its own."""

    needs_critic: ClassVar[bool] = False
    """True if it takes a critic's values, so that a run trains one."""
    needs_samples_per_prompt: ClassVar[int] = 1
    """Least `samples_per_prompt`."""

    kind: str
    """Name of the algorithm in the file: each has its own."""
    samples_per_prompt: Count = 1
    """Responses to each prompt of a batch; batch_size counts responses and must be a multiple of it."""
    kl: KLConfig = KLConfig()
    """The KL penalty."""
    score_clip: PositiveFloat | None = 10.0
    """Scores are clipped to plus or minus this, after normalisation. Null turns it off."""
    normalise_scores: bool = False
    """Subtract the running mean of the scores and divide by their running standard deviation."""
    clip_eps_low: Annotated[float, Field(gt=0, lt=1)] = CLIP_EPS
    """Distance below 1 beyond which a ratio gets no gradient."""
    clip_eps_high: PositiveFloat = CLIP_EPS
    """Distance above 1 beyond which a ratio gets no gradient."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio for negative advantages (Ye et al. 2020). Null turns it off; 3 is usual."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus. 0 turns it off; entropy is then estimated from the sampled tokens alone, at no
    cost (policy/sampled_entropy)."""
    epochs: Count = 2
    """Passes over each batch, for every learner."""
    minibatch_size: Count = 32
    """Samples per optimizer step, for every learner. What remains of a batch is a smaller last minibatch of each
    epoch, in which each token counts as in the others."""
    reduction: Reduction = "tokens"
    """Mean of the policy's losses over a minibatch. tokens: over all its tokens. trajectories: over its responses, of
    the mean over the tokens of each, so that a long response's tokens weigh less. A number: over its responses, of
    the sum over the tokens of each divided by that number, usually sampling.max_new_tokens."""
    old_logprobs: Literal["learner", "rollout"] = "learner"
    """Log-probs from before the update, for the ratio and for the KL penalty in the rewards. learner: the policy's
    own, by one more pass over the batch; `correction` then accounts for their distance from the engine's. rollout:
    the engine's, which sampled with them. They take no pass and no correction, but the engine's rounding counts as a
    move of the policy. That is little in float32, where they differ by less than 1e-4. The mismatch is measured by
    the first minibatch."""
    correction: Literal["tis", "tis-sequence", "icepop", "geometric", "decoupled", "dis"] = "tis"
    """The correction of samples for their distance from the learner's policy: the engine's rounding, and the age of
    samples where loop.max_staleness allows it. tis: weights per token, truncated at importance_cap; tis-sequence: one
    weight per response, truncated; icepop: weights per token, 0 outside importance_band; geometric: responses outside
    importance_band in the geometric mean are left out; decoupled: weights per token, 0 above importance_cap; dis: the
    ratio is to the engine's log-probs, and tokens outside importance_band are left out (no clip_eps, no dual_clip).
    With `old_logprobs: rollout` only dis has an effect. Sources are in docs/algorithm.md."""
    importance_band: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=1)]] | None = None
    """Lowest and highest ratio that icepop, geometric and dis train on; dis leaves out the two themselves. Null: 0.5
    to 5, 0.99 to 1.01, 0.2 to 4 (SAO's for coding tasks; for reasoning it has 0.7 to 6)."""
    importance_cap: Annotated[float, Field(ge=1)] | None = IMPORTANCE_CAP
    """Cap of the importance weights of tis, tis-sequence and decoupled between the rollout engine's log-probs and the
    learner's; with decoupled, AReaL's examples set 5, which leaves out less. Null turns off tis and tis-sequence (not
    allowed with loop.max_staleness above 0) and decoupled's filter; the mismatch is still measured."""
    max_token_staleness: NonNegativeInt | None = None
    """Tokens that were sampled by a version further than this behind the policy that trains on them are left out, of
    both learners' losses and of what is measured of the policy; the other tokens of their response are trained on.
    It has an effect if it is less than loop.max_staleness. Null: no token is left out."""

    @property
    def epochs_of_critic(self) -> int:
        """Passes over each batch for the critic, if there is one."""
        return self.epochs

    @property
    def needs_reference(self) -> bool:
        """True if a reference's log-probs are part of the training."""
        return self.kl.coef > 0

    @property
    def discard_limit(self) -> int:
        """Most groups that may be discarded for each one that a batch takes; 0 where none is."""
        return 0

    def admit(self, group: Group) -> bool:
        """True if the group may be trained on; else it is discarded, and another prompt takes its place. It follows
        from the group alone, so that a restart decides the same."""
        return True

    @abstractmethod
    def credit(self, responses: "Responses") -> Credit:
        """The advantages of a batch, and the returns for the critic if there is one. A pure function."""

    @property
    def corrects(self) -> bool:
        """True if samples are corrected for their distance from the learner's policy."""
        return self.old_logprobs == "learner" or self.correction == "dis"

    def oldest_trained(self, version: int) -> int | None:
        """The oldest version whose tokens the policy of `version` trains on; None: tokens of any version."""
        return None if self.max_token_staleness is None else version - self.max_token_staleness

    def needs_old_logprobs(self, samples: int) -> bool:
        """True if an update with so many samples needs the learner's log-probs beforehand: for a KL penalty in the
        rewards, or because it takes several optimizer steps. A single step computes them itself, with the same
        weights; and with the engine's log-probs the first step measures how far the learner's are from them."""
        if self.old_logprobs == "rollout":
            return False
        penalised = self.kl.coef > 0 and self.kl.placement == "reward"
        return penalised or self.epochs > 1 or self.minibatch_size < samples

    @model_validator(mode="after")
    def _correction_uses_what_is_given(self) -> Self:
        banded, name = self.correction in BANDED, self.correction
        if self.importance_band is not None and not banded:
            raise ValueError(f"importance_band is for {', '.join(BANDED)}, and correction is {name}; leave it out")
        if self.importance_cap not in (None, IMPORTANCE_CAP) and banded:
            raise ValueError(f"importance_cap does not belong to correction {name}, which has a band; leave it out")
        if self.dual_clip is not None and name == "dis":
            raise ValueError("dual_clip bounds a loss that correction dis does not use; leave it out")
        if self.old_logprobs == "rollout" and name not in ("tis", "dis"):
            raise ValueError(
                f"correction {name} compares the learner's log-probs with the engine's, and old_logprobs: rollout "
                "takes the engine's for both; leave it out, or set old_logprobs to learner"
            )
        if self.old_logprobs == "rollout" and self.importance_cap != IMPORTANCE_CAP:
            raise ValueError(
                "importance_cap bounds the learner's log-probs over the engine's, and old_logprobs: rollout takes "
                "the engine's for both; leave it out, or set old_logprobs to learner"
            )
        if name == "dis" and (self.clip_eps_low, self.clip_eps_high) != (CLIP_EPS, CLIP_EPS):
            raise ValueError("clip_eps_low and clip_eps_high do not belong to correction dis; leave them out")
        return self

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> Self:
        if self.samples_per_prompt < (least := self.needs_samples_per_prompt):
            raise ValueError(
                f"kind {self.kind} compares the responses to one prompt, so samples_per_prompt must be {least} or "
                f"more, got {self.samples_per_prompt}"
            )
        return self
