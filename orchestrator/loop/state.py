"""The state that the PPO loop carries from step to step; all other state is the learners'."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from orchestrator.algorithms.rewards import RunningNormaliser
from orchestrator.experience.experience import Scored
from orchestrator.experience.requests import Used
from orchestrator.loop.identities import PartIdentity
from quartet.config.base import Config


class TrainState(Config):
    """The loop's state after `step` steps. Together with the learners it determines the next step: prompts and
    seeds follow from the configuration and the number of samples used.

    Numbers that grow by one per step are kept as their value at step 0:

        first_version 7, first_critic_step 4:  at step 3 the policy's version is 10, the critic's step 7
    """

    format: Literal[6] = 6
    """Version of a checkpoint's format; raised when its files change."""
    step: int
    """Number of PPO steps done."""
    first_version: int
    """Policy version that the rollout replicas serve at step 0; more than 0 if they served another run before."""
    first_critic_step: int | None
    """The critic's last training step at step 0; more than 0 if it trained for another run before. None if the run
    has no critic."""
    kl_coef: float | None = None
    """Coefficient of the KL penalty in the next batch, as adapted so far; None if it is that of the configuration,
    since it is fixed or no batch has adapted it yet."""
    services: dict[str, PartIdentity] = Field(default_factory=dict)
    """Place -> identity of the services' models; with others the run would not be the same."""
    normalisers: dict[str, RunningNormaliser] = Field(default_factory=dict)
    """Name of a score -> running mean and deviation so far, of those that are normalised by them; `score` is the sum
    of several, or the only one."""
    samples_asked: int = 0
    """Samples requested since the run began, repetitions included."""
    samples_used: int = 0
    """Samples trained on since the run began, each once."""
    samples_discarded: int = 0
    """Samples discarded since the run began, as the algorithm did not admit their groups."""
    prompts_seen: frozenset[int] = frozenset()
    """Rows of the prompts of which a response got a score so far, whatever became of its group."""
    used_beyond: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Numbers of those samples that were trained on or discarded before one of a lower number, ascending; at most as
    many as may be sampled ahead. All samples numbered below `samples_used` + `samples_discarded` minus the count of
    these are used up. Empty at lock-step."""

    skipped_in_a_row: int = 0
    """Consecutive optimizer steps up to now whose gradient was not finite, the largest number of all learners. 0 in
    every checkpoint, since none is taken meanwhile."""

    @property
    def policy_version(self) -> int:
        """Policy version that the rollout replicas serve."""
        return self.first_version + self.step

    @property
    def critic_step(self) -> int | None:
        """The critic's last training step; None if the run has no critic."""
        return None if self.first_critic_step is None else self.first_critic_step + self.step

    @property
    def used(self) -> Used:
        """The numbers of the samples trained on or discarded."""
        count = self.samples_used + self.samples_discarded
        return Used(count - len(self.used_beyond), frozenset(self.used_beyond))

    def advanced(
        self,
        *,
        kl_coef: float | None,
        normalisers: dict[str, RunningNormaliser],
        asked: int,
        used: Sequence[Scored],
        discarded: int = 0,
        skipped_in_a_row: int = 0,
    ) -> Self:
        """The state after one more step, which used up these samples, in the order of their numbers; that many of
        them by discarding them."""
        return self.model_copy(
            update={
                "step": self.step + 1,
                "kl_coef": kl_coef,
                "normalisers": normalisers,
                "samples_asked": self.samples_asked + asked,
                "samples_used": self.samples_used + len(used) - discarded,
                "samples_discarded": self.samples_discarded + discarded,
                "prompts_seen": self.prompts_seen.union(each.row for each in used if not math.isnan(each.score)),
                "used_beyond": tuple(sorted(self.used.plus(each.number for each in used).beyond)),
                "skipped_in_a_row": skipped_in_a_row,
            }
        )
