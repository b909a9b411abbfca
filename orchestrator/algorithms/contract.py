"""The contract of an algorithm: its settings, which are the same for all, and what follows from them: the needs of a
run, the groups of responses that it admits, and the credit that it gives.

An algorithm is a class in a file beside this one and a row in `registry`. A preset only fills in settings:

    class Centred(Algorithm):

        kind: Literal["centred"] = "centred"
        baseline: Baseline = "group"
        samples_per_prompt: Count = 8

An estimate that the settings do not have is a method:

    class Signs(Algorithm):

        kind: Literal["signs"] = "signs"
        baseline: Baseline = "group"
        samples_per_prompt: Count = 8

        def credit(self, responses: "Responses") -> Credit:
            above = responses.compared(leave_one_out=False, divide=False)
            return Credit(responses.at_all_tokens(above.sign()))

Loop, configuration, checks and `quartet init` read everything else from it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator
from pydantic.fields import FieldInfo

from orchestrator.algorithms.named import NamedRewardConfig
from quartet.config.base import Config, ConfigError, Count, Fraction
from quartet.config.scores import AnyScoreName
from quartet.learner.reductions import Reduction
from quartet.wire.codec import Bools, Floats, Ints
from quartet.wire.pairs import SCORE

if TYPE_CHECKING:  # torch takes a second that an error in a file need not wait for
    from torch import Tensor

    from orchestrator.algorithms.responses import Responses

IMPORTANCE_CAP = 2.0
"""Default of Algorithm.importance_cap."""
BANDED = ("icepop", "geometric")
"""Corrections by a band of ratios; the others cap their weights."""
COMPARING = ("group", "leave-one-out")
"""Baselines that compare the responses to one prompt: a response is one action, with one advantage for all tokens."""

Baseline = Literal["critic", "group", "leave-one-out", "batch", "none"]
Clip = Literal["ppo", "cispo", "dis", "none"]
KLKind = Literal["k1", "k2", "k3"]
Correction = Literal["tis", "tis-sequence", "icepop", "geometric", "decoupled"]
Scale = Literal["none", "group", "batch"]
Ratio = Literal["token", "sequence"]
ZeroVariance = Literal["keep", "leave-out", "resample"]
AnyReduction = Reduction | Literal["constant"]
BelowOne = Annotated[float, Field(gt=0, lt=1)]


class KLConfig(Config):
    """The penalty that keeps the policy near the reference."""

    coef: NonNegativeFloat = 0.1
    """Coefficient of the penalty; the initial one if `target` is set. 0 turns the penalty off."""
    estimator: KLKind = "k1"
    """Schulman's estimator of KL(policy || reference) from samples of the policy, which kl/reference reports as well.
    In the reward only k1 pulls to the reference, in the loss only k2 and k3 do. With coef 0 any can be measured."""
    placement: Literal["reward", "loss"] = "reward"
    """Subtract it from each token's reward (k1), or add it to the policy's loss (k2, k3). The two are not the same
    penalty, and a coefficient of one does not carry over to the other; see docs/algorithm.md."""
    target: PositiveFloat | None = None
    """Adapt the coefficient towards this KL per response, in nats (Ziegler et al. 2019). Null keeps it fixed."""
    horizon: PositiveFloat = 10_000
    """Samples over which the adaptive coefficient reacts."""

    def _problems(self) -> Iterator[str]:
        if self.coef and self.placement == "loss" and self.estimator == "k1":
            yield "estimator k1 in the loss has an expected gradient of zero; choose k2 or k3"
        if self.coef and self.placement == "reward" and self.estimator != "k1":
            yield (
                f"estimator {self.estimator} in the reward does not pull to the reference, as a reward is not "
                "differentiated; choose k1, or placement loss"
            )
        if self.target is not None and self.coef == 0:
            yield "target adapts the coefficient by factors, so coef must be more than 0"
        if self.target is None and self.horizon != type(self).model_fields["horizon"].default:
            yield "horizon has no effect while target is null, as the coefficient is fixed; give it too"


@dataclass(frozen=True, slots=True)
class Group:
    """All G responses to one prompt, as an algorithm decides on them before a batch takes them."""

    scores: Mapping[str, Floats]
    """Name -> [G]; `score` alone where the reward service gives one score."""
    lengths: Ints
    """Tokens of each response, [G]."""
    truncated: Bools
    """True where the length limit cut the response off, [G]."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """B responses of a batch, as an algorithm decides which of them are trained on."""

    groups: Ints
    """Number of each response's group, [B]."""
    scores: Mapping[str, Floats]
    """Name -> the reward service's scores, [B]; `score` alone where it gives one."""
    truncated: Bools
    """True where the length limit cut the response off, [B]."""

    def zero_variance(self, names: Iterable[str]) -> Bools:
        """True at the responses of groups in which all scores of each of these names are the same, [B]."""
        _, of, counts = np.unique(self.groups, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        equal = np.ones(len(counts), np.bool_)
        for name in names:
            ordered = self.scores[name][np.lexsort((self.scores[name], of))]
            equal &= ordered[ends - counts] == ordered[ends - 1]
        of_each: Bools = equal[of]
        return of_each


class Credit(NamedTuple):
    """The credit of B responses of at most T tokens."""

    advantages: "Tensor"
    """[B, T], zero at tokens that are not trained on."""
    returns: "Tensor | None" = None
    """Targets of the critic, [B, T], zero at the same tokens; None without a critic."""


class Algorithm(Config):
    """The settings of all algorithms; each kind fills in some of them, and a file may set any of them otherwise."""

    critic_keys: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Keys of the critic service, with the values that belong to the kind. A file of facts fills them in; `quartet
    check` remarks on a whole file that has others."""
    kind: str
    """Name of the algorithm in the file: each has its own."""
    samples_per_prompt: Count = 1
    """Responses to each prompt of a batch; batch_size counts responses and must be a multiple of it."""
    baseline: Baseline = "none"
    """The value that a token's rewards to go are compared with. critic: that of a critic, which the run trains beside
    the policy, by generalised advantage estimation. group: the mean over all responses to the prompt; leave-one-out:
    over the other ones. With these two a response is one action, whose reward is the sum over its tokens, and its
    advantage is the same at all tokens. batch: the mean over all tokens of the batch. none: nothing."""
    scale: Scale = "none"
    """Divisor of the advantages. group: the deviation of the rewards of the prompt's responses, so that prompts which
    are nearly solved, or hardly ever, weigh more. batch: zero mean and unit variance over all tokens of the batch.
    none: nothing."""
    gamma: Fraction = 1.0
    """Discount per token, where advantages differ by token: not with baseline group or leave-one-out."""
    gae_lambda: Fraction = 0.95
    """Bias against variance in generalised advantage estimation, with baseline critic."""
    gae_lambda_alpha: PositiveFloat | None = None
    """Takes the policy's lambda from a response's length: 1 - 1 / (alpha T), at least 0, for T tokens, so that the
    score reaches the first tokens of a long response as well as of a short one. 1.5 in SAO. Null: gae_lambda."""
    critic_gae_lambda: Fraction | None = None
    """Lambda of the returns that the critic learns. 1, as in SAO: what was earned, without the critic's own values.
    Null: gae_lambda."""
    critic_epochs: Count | None = None
    """Passes over each batch for the critic, if others than `epochs`: more let it keep up with the policy. With
    minibatches of a whole batch, 2 are two critic updates to each policy update, as in SAO. Null: as `epochs`."""
    critic_only_steps: NonNegativeInt = 0
    """First steps of a run in which the critic learns and the policy does not, so that the policy's first advantages
    do not come from the values of a new head. 10 in SAO. They count as steps of the run."""
    ratio: Ratio = "token"
    """The ratio of the policy to that from before the update: each token's own, or for all tokens of a response the
    geometric mean of theirs, as in GSPO; `correction` then takes its ratio in the same way. A response's ratio is for
    a response's advantage, so sequence is for baseline group or leave-one-out."""
    clip: Clip = "ppo"
    """The bound of the ratio r in the loss. ppo: the lesser of r A and clip(r) A, by clip_eps_low and clip_eps_high.
    cispo: min(r, clip_cap) is a weight of the log-prob's gradient, which no token loses. dis: r is relative to the
    engine's log-probs, and tokens outside importance_band are left out; `correction` has no effect. none: r A."""
    clip_eps_low: BelowOne = 0.2
    """Distance below 1 beyond which a ratio gets no gradient, with clip ppo."""
    clip_eps_high: PositiveFloat = 0.2
    """Distance above 1 beyond which a ratio gets no gradient, with clip ppo."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio for negative advantages, with clip ppo (Ye et al. 2020). Null turns it off; 3 is usual."""
    clip_cap: Annotated[float, Field(ge=1)] = 5.0
    """Largest ratio with clip cispo: the bound itself, not its distance from 1."""
    reduction: AnyReduction = "tokens"
    """Mean of the policy's losses over a minibatch. tokens: over all its tokens. trajectories: over its responses, of
    the mean over the tokens of each, so that a long response's tokens weigh less. constant: over its responses, of
    the sum over the tokens of each divided by sampling.max_new_tokens; a number: divided by that number."""
    zero_variance: ZeroVariance = "keep"
    """Prompts whose responses all have the same score of the reward service, of each name that has a weight, which
    teach nothing. keep: trained on like others, by the KL penalty alone. leave-out: not trained on, nor counted in
    any mean over tokens or responses. resample: discarded, and another prompt takes their place."""
    max_discarded: Count = 9
    """With zero_variance resample: most groups that are discarded in a step for each one of its batch; the run then
    ends with an error, as the prompts are all too easy or too hard."""
    truncated: Literal["keep", "mask"] = "keep"
    """Responses that the length limit cut off. keep: trained on like others. mask: not trained on, nor counted in any
    mean over tokens or responses; their scores count in the baseline of their group."""
    overlong_buffer: NonNegativeInt = 0
    """The last tokens before sampling.max_new_tokens in which a response's score falls with each token (DAPO; 4096 of
    20480 there). 0: no penalty of length."""
    overlong_penalty: NonNegativeFloat = 1.0
    """The part of its score that a response of sampling.max_new_tokens loses by overlong_buffer; before score_clip,
    after normalisation."""
    rewards: dict[AnyScoreName, NamedRewardConfig] = Field(default_factory=dict)
    """Name -> weight, clip and normalisation of that score, where the reward service gives several: the sum of these
    terms is the response's score, which all other settings of scores are for. Exactly the names that it gives. Empty:
    it gives one score, without a name."""
    score_weight: NonNegativeFloat = 1.0
    """Factor of the score in the reward, after score_clip. 0: the KL penalty alone is the reward."""
    score_clip: PositiveFloat | None = 10.0
    """Scores are clipped to plus or minus this, after normalisation. Null turns it off."""
    normalise_scores: bool = False
    """Subtract the running mean of the scores and divide by their running standard deviation."""
    kl: KLConfig = KLConfig()
    """The KL penalty. A key that is not given is the kind's."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus. 0 turns it off; entropy is then estimated from the sampled tokens alone, at no
    cost (policy/sampled_entropy)."""
    epochs: Count = 2
    """Passes over each batch, for every learner."""
    minibatch_size: Count = 32
    """Samples per optimizer step, for every learner. What remains of a batch is a smaller last minibatch of each
    epoch, in which each token counts as in the others."""
    old_logprobs: Literal["learner", "rollout"] = "learner"
    """Log-probs from before the update, for the ratio and for the KL penalty in the rewards. learner: the policy's
    own, by one more pass over the batch; `correction` then accounts for their distance from the engine's. rollout:
    the engine's, which sampled with them. They take no pass and no correction, but the engine's rounding counts as a
    move of the policy. That is little in float32, where they differ by less than 1e-4. The mismatch is measured by
    the first minibatch."""
    correction: Correction = "tis"
    """The correction of samples for their distance from the learner's policy: the engine's rounding, and the age of
    samples where loop.max_staleness allows it. tis: weights per token, truncated at importance_cap; tis-sequence: one
    weight per response, truncated; icepop: weights per token, 0 outside importance_band; geometric: responses outside
    importance_band in the geometric mean are left out; decoupled: weights per token, 0 above importance_cap. With
    `old_logprobs: rollout` none has an effect. Sources are in docs/algorithm.md."""
    importance_band: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=1)]] | None = None
    """Lowest and highest ratio that corrections icepop and geometric, and clip dis, train on; dis leaves out the two
    themselves. Null: 0.5 to 5, 0.99 to 1.01, 0.2 to 4 (SAO's for coding tasks; for reasoning it has 0.7 to 6)."""
    importance_cap: Annotated[float, Field(ge=1)] | None = IMPORTANCE_CAP
    """Cap of the importance weights of tis, tis-sequence and decoupled between the rollout engine's log-probs and the
    learner's; with decoupled, AReaL's examples set 5, which leaves out less. Null turns off tis and tis-sequence (not
    allowed with loop.max_staleness above 0) and decoupled's filter; the mismatch is still measured."""
    max_token_staleness: NonNegativeInt | None = None
    """Tokens that were sampled by a version further than this behind the policy that trains on them are left out, of
    both learners' losses and of what is measured of the policy; the other tokens of their response are trained on.
    It has an effect if it is less than loop.max_staleness. Null: no token is left out."""

    @property
    def needs_critic(self) -> bool:
        """True if it takes a critic's values, so that a run trains one."""
        return self.baseline == "critic"

    @property
    def compares(self) -> bool:
        """True if the responses to one prompt are compared with each other."""
        return self.baseline in COMPARING

    @property
    def needs_samples_per_prompt(self) -> int:
        """Least `samples_per_prompt`."""
        compared = any(reward.normalise == "group" for reward in self.rewards.values())
        return 2 if self.compares or compared or self.zero_variance != "keep" else 1

    @property
    def needs_reference(self) -> bool:
        """True if a reference's log-probs are part of the training."""
        return self.kl.coef > 0

    @property
    def penalises_rewards(self) -> bool:
        """True if a token's reward holds the KL penalty."""
        return self.kl.coef > 0 and self.kl.placement == "reward"

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores that the reward service has to give for each response."""
        return tuple(self.rewards) or (SCORE,)

    @property
    def counted_names(self) -> tuple[str, ...]:
        """Names of the scores on which a response's score depends at some step."""
        return tuple(name for name, reward in self.rewards.items() if reward.counts) or self.score_names

    def misfits(self, names: Iterable[str], scorer: str) -> Iterator[str]:
        """Differences between `rewards` and the names of the scores that a scorer gives, none if it gives one without
        a name; `scorer` is its place in words."""
        given, weighed = dict.fromkeys(names), self.rewards.keys()
        field = "orchestrator.algorithm.rewards"
        gives = f"{scorer} gives {', '.join(given) if given else 'one score without a name'}"
        if missing := [name for name in given if name not in weighed]:
            yield f"{field}: lacks {', '.join(missing)}, as {gives}; give each its weight, or 0 to measure it only"
        if unknown := [name for name in weighed if name not in given]:
            yield f"{field}: has {', '.join(unknown)}, but {gives}; leave out what it does not give"

    @property
    def epochs_of_critic(self) -> int:
        """Passes over each batch for the critic, if there is one."""
        return self.critic_epochs or self.epochs

    def trains_policy(self, step: int) -> bool:
        """True if the policy learns in this step of a run, the first of which is 1."""
        return step > self.steps_without_policy

    @property
    def steps_without_policy(self) -> int:
        """First steps in which the critic, if there is one, learns alone."""
        return self.critic_only_steps if self.needs_critic else 0

    @property
    def discard_limit(self) -> int:
        """Most groups that may be discarded for each one that a batch takes; 0 where none is."""
        discards = self.zero_variance == "resample" or type(self).admit is not Algorithm.admit
        return self.max_discarded if discards else 0

    @property
    def corrects(self) -> bool:
        """True if samples are corrected for their distance from the learner's policy."""
        return self.old_logprobs == "learner" or self.clip == "dis"

    @property
    def leaves_out_far_tokens(self) -> bool:
        """True if tokens or responses are left out whose ratio of learner to engine is outside a band."""
        return self.clip == "dis" or (self.corrects and self.correction in BANDED)

    def sized(self, longest: int) -> Self:
        """The algorithm with a number as its reduction where that is the longest response, in tokens."""
        return self if self.reduction != "constant" else self.model_copy(update={"reduction": longest})

    def admit(self, group: Group) -> bool:
        """True if the group may be trained on; else it is discarded, and another prompt takes its place. It follows
        from the group alone, so that a restart decides the same."""
        scores = (group.scores[name] for name in self.counted_names)
        return self.zero_variance != "resample" or any(bool((each != each[0]).any()) for each in scores)

    def chosen(self, batch: Outcomes) -> Bools | None:
        """True at the responses of a batch that are trained on, [B]; None if all are."""
        left_out = np.zeros(len(batch.groups), np.bool_)
        if self.zero_variance == "leave-out":
            left_out = batch.zero_variance(self.counted_names)
        if self.truncated == "mask":
            left_out = left_out | batch.truncated
        return ~left_out if left_out.any() else None

    def score(self, scores: Mapping[str, Floats], step: int) -> Floats:
        """The score of each response as the reward service gives it: of several named ones the sum of each times its
        weight at this step, from 1, neither clipped nor normalised. Name -> [B] to [B] float32; NaN stands for a
        response without a score, and stays.

        Raises:
            ConfigError: a sum is beyond float32.
        """
        if not self.rewards:
            return scores[SCORE]
        with np.errstate(over="ignore", invalid="ignore"):
            terms = [scores[name].astype(np.float64) * each.weight_at(step) for name, each in self.rewards.items()]
            total: Floats = sum(terms[1:], terms[0]).astype(np.float32)
        scored = ~np.isnan([scores[name] for name in self.rewards]).any(axis=0)
        if not np.isfinite(total[scored]).all():
            raise ConfigError("orchestrator.algorithm.rewards: a sum of the weighted scores is too large for float32")
        return total

    def credit(self, responses: "Responses") -> Credit:
        """The advantages of a batch, and the returns for the critic if there is one. A pure function.

        With baseline group or leave-one-out a response is one action with the reward R_i, the sum over its tokens:
        see `groups.compared`. With critic, advantages and returns each have a lambda of their own where one is
        configured (decoupled GAE: Yuan et al. 2025, VC-PPO, arXiv:2503.01491; SAO, arXiv:2607.07508). Else they are
        the discounted rewards from each token to the end.
        """
        returns = None
        if self.compares:
            advantages = responses.at_all_tokens(
                responses.compared(leave_one_out=self.baseline == "leave-one-out", divide=self.scale == "group")
            )
        elif self.baseline == "critic":
            alpha, of_critic = self.gae_lambda_alpha, self.critic_gae_lambda
            advantages, returns = responses.gae(gamma=self.gamma, gae_lambda=self.gae_lambda)
            if alpha is not None:
                advantages, _ = responses.gae(gamma=self.gamma, gae_lambda=responses.length_lambdas(alpha))
            if of_critic is not None:
                _, returns = responses.gae(gamma=self.gamma, gae_lambda=of_critic)
        else:
            advantages = responses.to_go(gamma=self.gamma)
        if self.scale == "batch":
            advantages = responses.whitened(advantages)
        elif self.baseline == "batch":
            advantages = responses.centred(advantages)
        return Credit(advantages, returns)

    def oldest_trained(self, version: int) -> int | None:
        """The oldest version whose tokens the policy of `version` trains on; None: tokens of any version."""
        return None if self.max_token_staleness is None else version - self.max_token_staleness

    def needs_old_logprobs(self, samples: int) -> bool:
        """True if an update with so many samples needs the learner's log-probs beforehand: for a KL penalty in the
        rewards, or because it takes several optimizer steps. A single step computes them itself, with the same
        weights; and with the engine's log-probs the first step measures how far the learner's are from them."""
        if self.old_logprobs == "rollout":
            return False
        return self.penalises_rewards or self.epochs > 1 or self.minibatch_size < samples

    def filled_in(self) -> str:
        """A line for the user: the settings that the kind fills in, which are not the defaults of all algorithms, and
        those that a file has set otherwise."""
        preset = dict(_differences(type(self).model_validate({}), Algorithm.model_fields))
        ours = dict(_differences(self, type(self).model_fields))
        line = f"kind {self.kind} fills in " + ", ".join(f"{name} {value}" for name, value in preset.items())
        return line + ("; set otherwise: " + ", ".join(f"{k} {v}" for k, v in ours.items()) if ours else "")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A setting that a kind only fills in means what it means for all."""
        for name, field in cls.model_fields.items():
            if field.description is None and name in Algorithm.model_fields:
                field.description = Algorithm.model_fields[name].description

    @field_validator("kl", mode="before")
    @classmethod
    def _rest_of_the_penalty_is_the_kinds(cls, given: Any) -> Any:
        """Fills in the keys of `kl` that a file does not give."""
        if not isinstance(given, dict):
            return given
        preset = cls.model_fields["kl"].default.model_dump(exclude_unset=True)
        if given.keys() - {"estimator"} and "coef" not in given and preset.get("coef") == 0:
            kind = cls.model_fields["kind"].default
            raise ValueError(f"coef is 0 with kind {kind}, so that the other keys have no effect; give it too")
        return preset | given

    def _problems(self) -> Iterator[str]:
        """Settings that another leaves without effect, and combinations whose gradient is wrong."""
        for names, key, values in _OWNERS:
            if (actual := getattr(self, key)) not in values:
                for name in names:
                    if self._given(name):
                        yield f"{name} belongs to {key} {' or '.join(values)}, and {key} is {actual}; leave it out"
        if not self.discard_limit and self._given("max_discarded"):
            yield (
                f"max_discarded belongs to zero_variance resample, and zero_variance is {self.zero_variance}; leave "
                "it out"
            )
        if self.scale == "group" and not self.compares:
            yield (
                f"scale group divides by the deviation of a prompt's rewards, and baseline {self.baseline} does not "
                "compare them; choose baseline group or leave-one-out, or scale none or batch"
            )
        if self.scale == "group" and self.penalises_rewards:
            yield (
                "scale group divides the KL penalty in the rewards by their deviation too, so that kl.coef has no "
                "meaning of its own; set kl.placement to loss and kl.estimator to k2 or k3, or scale to none or batch"
            )
        if self.scale == "batch" and self.baseline == "none":
            yield (
                "scale batch subtracts the mean over the batch, which is baseline batch and not none; set baseline "
                "to batch, or scale to none"
            )
        if self.ratio == "sequence" and not self.compares:
            yield (
                f"ratio sequence is one ratio for a whole response, and the advantages of baseline {self.baseline} "
                "differ from token to token: a token's gradient would have the mean of all tokens' advantages; "
                "choose ratio token, or baseline group or leave-one-out"
            )
        if None not in (self.gae_lambda_alpha, self.critic_gae_lambda) and self._given("gae_lambda"):
            yield "gae_lambda has no effect beside gae_lambda_alpha and critic_gae_lambda; leave it out"
        if self.score_weight == 0:
            for name in ("score_clip", "normalise_scores", "overlong_buffer", "zero_variance"):
                if self._given(name):
                    yield f"{name} is for scores, which have no effect with score_weight 0; leave it out"
            for name, reward in self.rewards.items():
                if reward.clip is not None or reward.normalise != "none":
                    yield (
                        f"rewards.{name}: clip and normalise are for scores, which have no effect with score_weight "
                        "0; leave them out"
                    )
        if self.score_weight and self.rewards and not any(reward.counts for reward in self.rewards.values()):
            yield "rewards: all weights are 0, which leaves no score; give one of them another weight"
        if not self.overlong_buffer and self._given("overlong_penalty"):
            yield "overlong_penalty has no effect while overlong_buffer is 0; give it too"
        if self.score_weight == 0 and not self.penalises_rewards:
            yield "score_weight 0 leaves no reward, as no KL penalty is in it; give kl.coef, or a weight"
        banded, name = self.correction in BANDED, self.correction
        if self.clip == "dis":
            for given in ("correction", "importance_cap"):
                if self._given(given):
                    yield f"{given} has no effect with clip dis, which corrects by itself; leave it out"
        elif self.importance_band is not None and not banded:
            yield (
                f"importance_band is for correction {', '.join(BANDED)} and for clip dis, and correction is {name}; "
                "leave it out"
            )
        if self.importance_cap not in (None, IMPORTANCE_CAP) and banded:
            yield f"importance_cap does not belong to correction {name}, which has a band; leave it out"
        if self.old_logprobs == "rollout" and name != "tis":
            yield (
                f"correction {name} compares the learner's log-probs with the engine's, and old_logprobs: rollout "
                "takes the engine's for both; leave it out, or set old_logprobs to learner"
            )
        if self.old_logprobs == "rollout" and self.importance_cap != IMPORTANCE_CAP:
            yield (
                "importance_cap bounds the learner's log-probs over the engine's, and old_logprobs: rollout takes "
                "the engine's for both; leave it out, or set old_logprobs to learner"
            )
        if self.samples_per_prompt < (least := self.needs_samples_per_prompt):
            comparing = f"baseline {self.baseline}" if self.compares else f"zero_variance {self.zero_variance}"
            if not self.compares and self.zero_variance == "keep":
                comparing = "normalise group of a name in rewards"
            yield (
                f"{comparing} compares the responses to one prompt, so samples_per_prompt must be {least} or more, "
                f"got {self.samples_per_prompt}"
            )

    def _given(self, name: str) -> bool:
        """True if a setting is neither the kind's nor the default of all."""
        fields = [each.model_fields[name] for each in (type(self), Algorithm)]
        defaults = [field.get_default(call_default_factory=True) for field in fields]
        return getattr(self, name) not in defaults


def _differences(algorithm: Algorithm, fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, str]]:
    """Names of the settings that differ from the defaults of `fields`, with their values in words."""
    for name, field in fields.items():
        value = getattr(algorithm, name)
        if name == "kind" or value == field.get_default(call_default_factory=True):
            continue
        if isinstance(value, KLConfig):
            was = field.default
            yield from ((f"kl.{k}", _said(v)) for k, v in value if v != getattr(was, k))
        else:
            yield name, _said(value)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return " + ".join(f"{_said(each.weight)} {name}" for name, each in value.items())
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_said, value)) + "]"
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


_OWNERS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("gae_lambda", "gae_lambda_alpha", "critic_gae_lambda", "critic_epochs", "critic_only_steps"),
        "baseline",
        ("critic",),
    ),
    (("gamma",), "baseline", ("critic", "batch", "none")),
    (("clip_eps_low", "clip_eps_high", "dual_clip"), "clip", ("ppo",)),
    (("clip_cap",), "clip", ("cispo",)),
)
"""Settings, and the setting of which one of these values makes them effective."""
