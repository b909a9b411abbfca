"""Configuration of the reference service: the `args:` of its application in the YAML file."""

from typing import Annotated

from pydantic import Field

from services.common.config import ModelPath
from services.common.frozen_config import FrozenConfig

Count = Annotated[int, Field(ge=1)]


class ReferenceConfig(FrozenConfig):
    """The frozen model that the KL penalty is measured against."""

    model: ModelPath
    """Folder of the Hugging Face model, usually the policy's starting point."""
    max_waiting: Count = 4096
    """Most responses that may wait; more are refused with RESOURCE_EXHAUSTED."""
