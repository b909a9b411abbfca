"""Overlap of sampling and training."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveFloat

from quartet.config.base import Config, Count


class LoopConfig(Config):
    """Overlap of sampling and training."""

    max_staleness: Annotated[int, Field(ge=0, le=100)] = 0
    """Most versions between the weights that sampled a token and the policy that trains on it. 0: lock-step, every
    sample comes from the policy that it trains. 1 or more: samples are made without a pause and weights are pushed
    while a batch trains. The bound holds for every token of every sample, because samples are admitted late enough;
    none is discarded for its age."""
    depth: Count | None = None
    """Number of batches that are sampled ahead of the one that trains, at most max_staleness. Null: max_staleness.
    Fewer batches need less room in the engines. And a batch is then formed without its slowest samples, each of which
    joins one of the next max_staleness - depth batches, and sampling does not wait for every push."""

    colocate: bool = False
    """While the learners compute, rollout replicas pause and release the memory of their KV cache, for runs whose
    parts share a GPU. The push brings it back. Requires `colocate: true` in the rollout's `args` and
    max_staleness 0."""

    mismatch_limit: PositiveFloat | None = None
    """Largest mean difference, in nats per token, between the rollout engine's and the learner's log-probs of tokens
    that the present version sampled (`mismatch/present_mean_abs`), of those in the first minibatch with
    `algorithm.old_logprobs: rollout`. A step beyond it is reported; several in a row end the run. Null: five times
    what the first step measures, when both sides begin with the same weights; from 0.001 to 0.02 in float32, and from
    0.05 to 0.2 in bfloat16."""
    mismatch_steps: Count = 3
    """Steps in a row beyond that limit that end the run."""

    def _problems(self) -> Iterator[str]:
        if self.depth is not None and self.depth > self.max_staleness:
            yield (
                f"depth ({self.depth}) must not exceed max_staleness ({self.max_staleness}), as a batch that is "
                f"sampled so far ahead would be too old to train on: set max_staleness to {self.depth} or more, or a "
                "lower depth"
            )
        if self.colocate and self.max_staleness:
            yield (
                "colocate: replicas would pause as they sample ahead: set max_staleness, which is "
                f"{self.max_staleness}, to 0, or leave colocate out"
            )

    @property
    def ahead(self) -> int:
        """Number of batches that are sampled ahead of the one that trains."""
        return self.max_staleness if self.depth is None else self.depth
