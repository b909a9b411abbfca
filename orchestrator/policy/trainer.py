"""The policy learner: log-probs and one PPO batch's worth of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.kl import kl_estimate
from orchestrator.algorithms.loss import PolicyLoss, policy_loss
from orchestrator.algorithms.off_policy import correction_weights, dis_loss, segments_of
from orchestrator.policy.sending import WeightSending
from quartet.config.learner import PolicyConfig
from quartet.learner.learner import RankLearner, Snapshots
from quartet.learner.lora import add_adapters
from quartet.learner.minibatches import Means, minibatches, tokens_trained, weight_of
from quartet.learner.reductions import factors, units
from quartet.learner.shards import Pass
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal, load_tokenizer
from quartet.models.numerics import masked_sum
from quartet.models.sequences import PairTensors
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """One PPO batch of B responses, as the policy trains on it; every field B arrays."""

    prompts: Sequence[Ints]
    """[P]"""
    responses: Sequence[Ints]
    """[T]"""
    logprobs: Sequence[Floats]
    """[T] as sampled, by the rollout engine"""
    old_logprobs: Sequence[Floats] | None
    """[T] by this learner, before the update; None where the update does without, see Algorithm.needs_old_logprobs"""
    ref_logprobs: Sequence[Floats] | None
    """[T] by the frozen reference; None where the run has none"""
    advantages: Sequence[Floats]
    """[T]"""
    kl_coef: float
    """Coefficient of the KL penalty in this batch's loss; used when algorithm.kl.placement is loss."""
    trained: Sequence[Bools] | None = None
    """[T] True at the tokens that are trained on; None: all are"""


@dataclass(frozen=True, slots=True)
class _Micro:
    rows: Sequence[int]
    """The pairs' numbers in the batch; none on a rank whose share only makes the ranks' counts equal."""
    pairs: PairTensors
    mask: torch.Tensor
    """The tokens that are trained on; none on that rank."""
    logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    tokens: int
    """Tokens of the whole minibatch that are trained on."""
    factors: torch.Tensor | None
    """Factor of each token's loss by the reduction; None where all are 1."""
    weight: float
    """Weight of the minibatch's loss."""
    kl_coef: float


class PolicyTrainer:
    """A language model under DeepSpeed, or one rank's share of it.

    Calls must not overlap. All ranks get the same calls in the same order, but for those that say otherwise.
    """

    def __init__(
        self, config: PolicyConfig, algorithm: Algorithm, distribution: Distribution, ranks: Ranks | None = None
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._distribution = distribution
        model = load_causal(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        self._learner = RankLearner(add_adapters(model, config.lora), config, ranks)
        self._computed: list[tuple[_Micro, torch.Tensor]] = []
        """Log-probs that the first step of the last update computed, if its batch came without."""
        self._lengths: list[int] = []
        """Tokens of each response of that batch; 0 of those that were not in the first step."""
        self._keeping = False
        """True in that step."""
        self.sending = WeightSending(self._learner)
        self.snapshots = Snapshots(self._learner, self._write, kind="policy", exported=True)

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, and others with the same learner."""
        return self, self.sending, self.snapshots

    def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """log pi(y_t | prefix) under the current weights, in the distribution sampled from; [T] for each pair."""
        logprobs: list[Floats] = self._logprobs(prompts, responses, self._distribution)
        return logprobs

    def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first, over the whole vocabulary; [T - 1] for each sequence."""
        firsts, others = [row[:1] for row in sequences], [row[1:] for row in sequences]
        logprobs: list[Floats] = self._logprobs(firsts, others, Distribution())
        return logprobs

    @torch.no_grad()
    def _logprobs(
        self, prompts: Sequence[Ints], responses: Sequence[Ints], distribution: Distribution
    ) -> list[Floats]:
        by_row: dict[int, Floats] = {}
        for each in self._learner.passes(prompts, responses):
            rows = each.rows
            pairs = self._learner.tensors([prompts[i] for i in rows], [responses[i] for i in rows])
            logprobs, _ = distribution.asked_of(self._learner.model, pairs)
            if each.counts:
                by_row |= dict(zip(rows, pairs.unpad(logprobs), strict=True))
        return self._learner.shared(by_row, [len(response) for response in responses])

    def train(self, batch: PolicyBatch, seed: int) -> dict[str, float]:
        """Trains on one batch; returns the mean metrics over its optimizer steps, the number of steps skipped for a
        gradient that was not finite, and how many were skipped in a row up to now. NotFinite if a
        weight is not finite.

        `first_log_ratio_max` is 0 but for rounding: nothing has moved yet. Anything else is a defect; but where
        algorithm.old_logprobs is rollout, it is the distance from the engine: rounding, and the age of the samples. A
        minibatch of which no token is trained on is left out and counted (`empty_steps`). ValueError if the batch has
        no old log-probs and the update needs them, see Algorithm.needs_old_logprobs.
        """
        if batch.old_logprobs is None and self._algorithm.needs_old_logprobs(len(batch.prompts)):
            raise ValueError(f"{len(batch.prompts)} responses have no old_logprobs, and this update needs them")
        self._computed, self._lengths = [], [0] * len(batch.responses)
        means, first, counts = Means(), dict[str, float](), tokens_trained(batch.responses, batch.trained)
        reduction = self._algorithm.reduction
        order = minibatches(
            len(batch.prompts), epochs=self._algorithm.epochs, size=self._algorithm.minibatch_size, seed=seed
        )
        with self._learner.optimizer_state.resident():
            for chosen in order:
                if not (tokens := sum(counts[i] for i in chosen)):
                    means.leave_out()
                    continue
                weight = weight_of(chosen, units(reduction, counts), self._algorithm.minibatch_size)
                scales = factors(reduction, [counts[i] for i in chosen])
                self._keeping = batch.old_logprobs is None and not any(self._lengths)
                if self._keeping:
                    first_rows = set(chosen)
                    self._lengths = [len(row) if i in first_rows else 0 for i, row in enumerate(batch.responses)]
                measured = self._learner.step(self._micro_batches(batch, chosen, tokens, weight, scales), self._loss)
                if measured and not first:
                    first = {"first_log_ratio_max": measured["log_ratio_max"]}
                means.add(measured, weight)
        self._learner.check_weights()
        return means.result() | first | {"skipped_in_a_row": float(self._learner.skipped_in_a_row)}

    def trained_logprobs(self) -> list[Floats]:
        """The learner's log-probs of a batch that came without them, as its first optimizer step computed them before
        it changed the weights: [T] for each response of that step, [0] for others. Every rank calls it, once."""
        by_row: dict[int, Floats] = {}
        for micro, logprobs in self._computed:
            by_row |= dict(zip(micro.rows, micro.pairs.unpad(logprobs), strict=True))
        self._computed = []
        return self._learner.shared(by_row, self._lengths)

    def _micro_batches(
        self, batch: PolicyBatch, chosen: Sequence[int], tokens: int, weight: float, scales: Sequence[float] | None
    ) -> list[_Micro]:
        prompts, responses = [batch.prompts[i] for i in chosen], [batch.responses[i] for i in chosen]
        passes = self._learner.passes(prompts, responses)
        return [self._micro(batch, chosen, each, tokens, weight, scales) for each in passes]

    def _micro(
        self,
        batch: PolicyBatch,
        chosen: Sequence[int],
        one: Pass,
        tokens: int,
        weight: float,
        scales: Sequence[float] | None,
    ) -> _Micro:
        rows = [chosen[i] for i in one.rows]
        pairs = self._learner.tensors([batch.prompts[i] for i in rows], [batch.responses[i] for i in rows])

        def spread(values: Sequence[Floats]) -> torch.Tensor:
            return pairs.spread([values[i] for i in rows])

        marks = None if batch.trained is None else [batch.trained[i] for i in rows]
        return _Micro(
            rows=rows if one.counts else (),
            pairs=pairs,
            mask=pairs.trained(marks, counts=one.counts),
            logprobs=spread(batch.logprobs),
            old_logprobs=None if batch.old_logprobs is None else spread(batch.old_logprobs),
            ref_logprobs=None if batch.ref_logprobs is None else spread(batch.ref_logprobs),
            advantages=spread(batch.advantages),
            tokens=tokens,
            factors=None if scales is None else _constant([scales[i] for i in one.rows], pairs),
            weight=weight,
            kl_coef=batch.kl_coef,
        )

    def _loss(self, micro: _Micro) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of one micro-batch: every term a sum over tokens, each with its factor, divided by the minibatch's
        token count. Metrics are means over tokens."""
        algorithm, mask = self._algorithm, micro.mask
        measured: dict[str, torch.Tensor] = {}
        new_logprobs, entropies = self._distribution.asked_of(
            self._learner.model, micro.pairs, entropy=algorithm.entropy_coef > 0
        )
        if entropies is not None:
            measured["entropy"] = masked_sum(entropies, mask) / micro.tokens
        if self._keeping and micro.rows:
            self._computed.append((micro, new_logprobs.detach()))
        old_logprobs = self._old_logprobs(micro, new_logprobs)
        result = self._policy_loss(micro, new_logprobs, old_logprobs)
        loss = result.loss
        if algorithm.entropy_coef > 0:
            loss = loss - algorithm.entropy_coef * _reduced(entropies, micro)
        if algorithm.kl.placement == "loss" and micro.kl_coef > 0 and micro.ref_logprobs is not None:
            kl = kl_estimate(new_logprobs, micro.ref_logprobs, algorithm.kl.estimator, mask)
            loss = loss + micro.kl_coef * _reduced(kl, micro)
        measured |= {
            "loss": loss,
            "sampled_entropy": -masked_sum(new_logprobs.detach(), mask) / micro.tokens,
            "log_ratio_max": torch.where(mask, new_logprobs - old_logprobs, 0.0).abs().max(),
        }
        return loss * micro.weight, result._asdict() | measured

    def _old_logprobs(self, micro: _Micro, new_logprobs: torch.Tensor) -> torch.Tensor:
        """The engine's log-probs if configured, those that came with the batch, or else the present ones, since no
        step has been taken yet."""
        if self._algorithm.old_logprobs == "rollout":
            return micro.logprobs
        return new_logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs

    def _policy_loss(self, micro: _Micro, new_logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> PolicyLoss:
        algorithm, mask = self._algorithm, micro.mask
        if algorithm.correction == "dis":
            return dis_loss(
                new_logprobs,
                micro.logprobs,
                micro.advantages,
                mask,
                band=algorithm.importance_band,
                weights=micro.factors,
                denominator=micro.tokens,
            )
        weights = correction_weights(
            algorithm.correction,
            old_logprobs,
            micro.logprobs,
            mask,
            sampled=micro.pairs.action_mask,
            cap=algorithm.importance_cap,
            band=algorithm.importance_band,
            segments=segments_of(micro.pairs.steps),
        )
        return policy_loss(
            new_logprobs,
            old_logprobs,
            micro.advantages,
            mask,
            clip_eps_low=algorithm.clip_eps_low,
            clip_eps_high=algorithm.clip_eps_high,
            dual_clip=algorithm.dual_clip,
            weights=weights if micro.factors is None else weights * micro.factors,
            denominator=micro.tokens,
        )

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self._learner.module.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        load_tokenizer(self._config.model).save_pretrained(folder)


def _reduced(values: torch.Tensor, micro: _Micro) -> torch.Tensor:
    """The reduction of one value per token: the micro-batch's share of the minibatch's."""
    return masked_sum(values if micro.factors is None else values * micro.factors, micro.mask) / micro.tokens


def _constant(numbers: Sequence[float], pairs: PairTensors) -> torch.Tensor:
    """One number per response, at each of its tokens."""
    rows = zip(numbers, pairs.lengths, strict=True)
    return pairs.spread([np.full(length, number, np.float32) for number, length in rows])
