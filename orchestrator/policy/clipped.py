"""The policy's objective: the bounded loss of an algorithm, corrected for where the samples come from."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.kl import kl_estimate
from orchestrator.algorithms.loss import PolicyLoss, bound, policy_loss
from orchestrator.algorithms.off_policy import band_of, correction_weights, segments_of
from quartet.columns import Field, Schema
from quartet.learner.objective import Micro, Objective, Terms
from quartet.learner.reductions import Reduction
from quartet.models.distribution import Distribution


@dataclass(frozen=True)
class ClippedPolicy(Objective):
    """The loss of an algorithm's advantages, with the KL penalty and the entropy bonus where it has them."""

    columns: ClassVar[Schema] = {
        "logprobs": Field("sampled"),
        "old_logprobs": Field("sampled", optional=True),
        "ref_logprobs": Field("sampled", optional=True),
        "advantages": Field("sampled"),
    }
    """Log-probs as sampled, by the rollout engine; by this learner before the update, which an update may do without,
    see Algorithm.needs_old_logprobs; and by the frozen reference, where the run has one."""
    firsts: ClassVar[tuple[str, ...]] = ("log_ratio_max",)

    algorithm: Algorithm
    distribution: Distribution
    """The distribution that the responses were sampled from."""
    kl_coef: float
    """Coefficient of the KL penalty in this batch's loss; used when algorithm.kl.placement is loss."""

    @property
    def reduction(self) -> Reduction:  # type: ignore[override]
        """The algorithm's. ValueError if it is of an unknown length, see Algorithm.sized."""
        if self.algorithm.reduction == "constant":
            raise ValueError("reduction constant: the longest response is not known here")
        return self.algorithm.reduction

    def __call__(self, model: Any, micro: Micro) -> Terms:
        """Metrics are means over tokens, whatever the reduction. The new log-probs are what may be kept."""
        algorithm, mask = self.algorithm, micro.mask
        new_logprobs, entropies = self.distribution.asked_of(model, micro.pairs, entropy=algorithm.entropy_coef > 0)
        old_logprobs = self._old_logprobs(micro, new_logprobs)
        result = self._policy_loss(micro, new_logprobs, old_logprobs)
        loss, measured = result.loss, dict[str, Tensor]()
        if entropies is not None:
            measured["entropy"] = micro.mean(entropies)
            loss = loss - algorithm.entropy_coef * micro.reduced(entropies)
        reference = micro.columns.get("ref_logprobs")
        if algorithm.kl.placement == "loss" and self.kl_coef > 0 and reference is not None:
            kl = kl_estimate(new_logprobs, reference, algorithm.kl.estimator, mask)
            loss = loss + micro.reduced(kl, self.kl_coef)
        measured |= {
            "loss": loss,
            "sampled_entropy": -micro.mean(new_logprobs),
            "log_ratio_max": torch.where(mask, new_logprobs - old_logprobs, 0.0).abs().max(),
        }
        return Terms(loss, result._asdict() | measured, new_logprobs.detach())

    def _old_logprobs(self, micro: Micro, new_logprobs: Tensor) -> Tensor:
        """The engine's log-probs if configured, those that came with the batch, or else the present ones, since no
        step has been taken yet."""
        if self.algorithm.old_logprobs == "rollout":
            return micro.columns["logprobs"]
        return micro.columns.get("old_logprobs", new_logprobs.detach())

    def _policy_loss(self, micro: Micro, new_logprobs: Tensor, old_logprobs: Tensor) -> PolicyLoss:
        algorithm, mask = self.algorithm, micro.mask
        logprobs, advantages = micro.columns["logprobs"], micro.columns["advantages"]
        sequence, segments = algorithm.ratio == "sequence", segments_of(micro.pairs.steps)
        weights, base = micro.factors, logprobs
        if algorithm.clip != "dis":
            base = old_logprobs
            weights = correction_weights(
                algorithm.correction,
                old_logprobs,
                logprobs,
                mask,
                sampled=micro.sampled,
                cap=algorithm.importance_cap,
                band=algorithm.importance_band,
                segments=segments,
                sequence=sequence,
            )
            weights = weights if micro.factors is None else weights * micro.factors
        return policy_loss(
            new_logprobs,
            base,
            advantages,
            mask,
            bound=bound(
                algorithm.clip,
                low=algorithm.clip_eps_low,
                high=algorithm.clip_eps_high,
                dual=algorithm.dual_clip,
                cap=algorithm.clip_cap,
                band=band_of(algorithm.clip, algorithm.importance_band),
            ),
            weights=weights,
            denominator=micro.tokens,
            sequence=sequence,
            segments=segments,
        )
