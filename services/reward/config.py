"""Configuration of the reward service: the `args:` of its application in the YAML file."""

from typing import Annotated, Literal, Union

from pydantic import Field

from services.common.config import Config, ModelPath, matching
from services.common.frozen_config import FrozenConfig

Count = Annotated[int, Field(ge=1)]


class ModelScorerConfig(FrozenConfig):
    """A Hugging Face sequence-classification model with one label."""

    kind: Literal["model"]
    """Which scorer this is."""
    model: ModelPath
    """Folder of the model. Its tokenizer must be the service's."""
    normalise: bool = True
    """Subtract `reward_mean` and divide by `reward_std` where the model's config.json has them."""


class FunctionScorerConfig(Config):
    """A Python function of texts."""

    kind: Literal["function"]
    """Which scorer this is."""
    function: Annotated[str, matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "package.module:function")]
    """`package.module:function`, taking a sequence of services.common.pairs.Pair and returning a score for each."""


class BlendPart(Config):
    """One scorer of a blend."""

    weight: float
    """Factor of this scorer's score."""
    scorer: "ScorerConfig"
    """The scorer."""


class BlendScorerConfig(Config):
    """The weighted sum of several scorers."""

    kind: Literal["blend"]
    """Which scorer this is."""
    parts: Annotated[list[BlendPart], Field(min_length=1)]
    """What is summed."""


ScorerConfig = Annotated[
    Union[ModelScorerConfig, FunctionScorerConfig, BlendScorerConfig],  # noqa: UP007 - forward references
    Field(discriminator="kind"),
]


class RewardConfig(Config):
    """What scores, and whose token ids the requests carry."""

    tokenizer: ModelPath
    """Folder whose tokenizer the requests' token ids belong to: the policy's."""
    scorer: ScorerConfig
    """kind: model, function or blend."""
    max_length: Count = 4096
    """Longest prompt + response, in tokens; a model's own limit counts too."""
    max_waiting: Count = 4096
    """Most pairs that may wait; more are refused with RESOURCE_EXHAUSTED."""


BlendPart.model_rebuild()
BlendScorerConfig.model_rebuild()
RewardConfig.model_rebuild()
