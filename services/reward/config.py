"""Configuration of the reward service: the `args:` of its application in the YAML file."""

from typing import Annotated, Literal, Union

from pydantic import Field

from quartet.config.base import Config, Count, ModelPath, matching
from quartet.config.frozen import FrozenConfig
from quartet.config.functions import PATH
from quartet.config.limits import LimitsConfig


class ModelScorerConfig(FrozenConfig):
    """A Hugging Face sequence-classification model with one label."""

    kind: Literal["model"]
    """Kind of the scorer."""
    model: ModelPath
    """Folder of the model. Its tokenizer must equal the service's."""
    normalise: bool = True
    """Subtract `reward_mean` and divide by `reward_std` if the model's config.json has them."""


class FunctionScorerConfig(Config):
    """A Python function of texts."""

    kind: Literal["function"]
    """Kind of the scorer."""
    function: Annotated[str, matching(PATH, "package.module:function")]
    """`package.module:function`, which takes a sequence of Pair (quartet/wire/pairs.py) and returns
    scores."""
    batch_tokens: Count = 16_384
    """Most tokens of the pairs in one call of the function."""


class BlendPart(Config):
    """One scorer of a blend."""

    weight: float
    """Factor of this scorer's score."""
    scorer: "ScorerConfig"
    """The scorer."""


class BlendScorerConfig(Config):
    """The weighted sum of several scorers."""

    kind: Literal["blend"]
    """Kind of the scorer."""
    parts: Annotated[list[BlendPart], Field(min_length=1)]
    """The scorers that are summed, with their weights."""


ScorerConfig = Annotated[
    Union[ModelScorerConfig, FunctionScorerConfig, BlendScorerConfig],  # noqa: UP007 - forward references
    Field(discriminator="kind"),
]


class RewardConfig(Config):
    """The scorer, and the tokenizer of the requests' token ids."""

    tokenizer: ModelPath
    """Folder of the tokenizer of the requests' token ids, usually the policy's."""
    scorer: ScorerConfig
    """The scorer; its `kind` is model, function or blend."""
    max_length: Count = 4096
    """Longest prompt + response, in tokens; a model's own limit applies as well."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on waiting calls, their shares among callers, and the time of a pass."""


BlendPart.model_rebuild()
BlendScorerConfig.model_rebuild()
RewardConfig.model_rebuild()
