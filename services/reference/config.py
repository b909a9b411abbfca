"""Configuration of the reference service: the `args:` of its application in the YAML file."""

from quartet.config.base import ModelPath
from quartet.config.frozen import FrozenConfig
from quartet.config.limits import LimitsConfig


class ReferenceConfig(FrozenConfig):
    """The frozen model that the KL penalty is measured against."""

    model: ModelPath
    """Folder of the Hugging Face model, usually the policy's starting point."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on waiting calls, their shares among callers, and the time of a pass."""
