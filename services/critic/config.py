"""Configuration of the critic service: the `args:` of its application in the YAML file."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import PositiveFloat

from quartet.config.base import Seed
from quartet.config.learner import LearnerConfig
from quartet.config.limits import LimitsConfig, completed_by

_LIMITS = LimitsConfig(batch_s=60)
_TRAIN_LIMITS = LimitsConfig(
    max_call_rows=1 << 16, max_call_tokens=1 << 26, max_waiting_rows=1 << 17, max_waiting_tokens=1 << 27
)


class CriticConfig(LearnerConfig):
    """A value model and its optimizer: the body of `model` (usually the reward model) with a new head, or the head
    that a critic saved there.

    A single rank computes in the replica's place, with its environment and its GPU. Several ranks have CPUs and GPUs
    of their own, and the replica then needs no GPU itself.
    """

    value_clip_eps: PositiveFloat | None = 0.2
    """Distance from the old value beyond which a value gets no gradient (PPO2). Null turns the clip off."""
    seed: Seed = 0
    """Seed of a new head's initial weights."""
    limits: Annotated[LimitsConfig, completed_by(_LIMITS)] = _LIMITS
    """Limits on waiting calls for values, their shares among callers, and the time of a pass. A pass that hangs costs
    the critic its state: it resumes from its last checkpoint."""
    train_limits: Annotated[LimitsConfig, completed_by(_TRAIN_LIMITS)] = _TRAIN_LIMITS
    """Limits on Train, which does not wait in that queue. `batch_s` has no effect here; `rank_timeout_s` has."""

    root: str = "runs"
    """The only folder under which checkpoints and saved models are written and read. With several nodes it has to be
    on a disk that all share. The same as `orchestrator.checkpoint.root`. The run's lease is kept there too."""

    def _problems(self) -> Iterator[str]:
        if self.optimizer.schedule == "cosine" and self.optimizer.total_steps is None:
            yield "optimizer.total_steps is required by schedule: cosine"
        if given := self.place_without_ranks:
            yield (
                f"{', '.join(given)}: for several ranks, which have a place of their own; with ranks: 1 set "
                "ray_actor_options and runtime_env of the deployment"
            )
