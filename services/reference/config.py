"""Configuration of the reference service: the `args:` of its application in the YAML file."""

from typing import Annotated

from pydantic import Field

from services.common.config import Config, Dtype, ModelPath

Count = Annotated[int, Field(ge=1)]


class ReferenceConfig(Config):
    """The frozen model that the KL penalty is measured against."""

    model: ModelPath
    """Folder of the Hugging Face model, usually the policy's starting point."""
    dtype: Dtype = "bfloat16"
    """Arithmetic of the forward pass."""
    batch_tokens: Count = 16_384
    """Most tokens, padding included, in one forward pass."""
    max_waiting: Count = 4096
    """Most responses that may wait; more are refused with RESOURCE_EXHAUSTED."""
