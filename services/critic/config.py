"""Configuration of the critic service: the `args:` of its application in the YAML file."""

from typing import Annotated

from pydantic import Field

from services.common.learner_config import LearnerConfig

Count = Annotated[int, Field(ge=1)]


class CriticConfig(LearnerConfig):
    """A value model: the body of `model` (usually the reward model) with a new head, and its optimizer."""

    value_clip_eps: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a value may move from its old one before its gradient stops (PPO2). Null turns the clip off."""
    seed: int = 0
    """Of the new head's initial weights."""
    max_waiting: Count = 4096
    """Most responses that may wait for values; more are refused with RESOURCE_EXHAUSTED."""
