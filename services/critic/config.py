"""Configuration of the critic service: the `args:` of its application in the YAML file."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.common.learner_config import LearnerConfig

Count = Annotated[int, Field(ge=1)]


class CriticConfig(LearnerConfig):
    """A value model and its optimizer: the body of `model` (usually the reward model) with a new head, or with the
    head that a critic saved there.

    A single rank runs in the replica itself. Several are Ray actors beside it, which then needs no GPU of its own.
    """

    value_clip_eps: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a value may move from its old one before its gradient stops (PPO2). Null turns the clip off."""
    seed: int = 0
    """Of a new head's initial weights."""
    max_waiting: Count = 4096
    """Most responses that may wait for values; more are refused with RESOURCE_EXHAUSTED."""

    @model_validator(mode="after")
    def _a_single_rank_is_the_replica(self) -> Self:
        if self.ranks == 1 and (given := {"num_cpus", "num_gpus", "resources", "env_vars"} & self.model_fields_set):
            raise ValueError(
                f"{', '.join(sorted(given))}: for ranks beside the replica; with ranks: 1 set ray_actor_options and "
                "runtime_env of the deployment"
            )
        return self
