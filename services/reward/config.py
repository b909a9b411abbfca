"""Configuration of the reward service: the `args:` of its application in the YAML file."""

from typing import Annotated, Literal, Self, Union

from pydantic import Field, model_validator

from quartet.config.base import Config, Count, ModelPath, matching
from quartet.config.frozen import FrozenConfig
from quartet.config.functions import PATH
from quartet.config.limits import LimitsConfig
from quartet.config.scores import ScoreName


class ModelScorerConfig(FrozenConfig):
    """A Hugging Face sequence-classification model with one label."""

    kind: Literal["model"]
    """Kind of the scorer."""
    model: ModelPath
    """Folder of the model. Its tokenizer must equal the service's."""
    normalise: bool = True
    """Subtract `reward_mean` and divide by `reward_std` if the model's config.json has them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores of a pair: none, as there is one."""
        return ()


class FunctionScorerConfig(Config):
    """A Python function of texts."""

    kind: Literal["function"]
    """Kind of the scorer."""
    function: Annotated[str, matching(PATH, "package.module:function")]
    """`package.module:function`, which takes a sequence of Pair (quartet/wire/pairs.py) and returns
    a score for each."""
    names: tuple[ScoreName, ...] = ()
    """Names of the scores, if the function gives several for each pair: it then returns a mapping of exactly these
    names to numbers for each. Empty: it returns a number for each."""
    batch_tokens: Count = 16_384
    """Most tokens of the pairs in one call of the function."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len({*self.names}) < len(self.names):
            raise ValueError(f"names: {', '.join(self.names)} has one twice; give each score a name of its own")
        return self


class SeveralScorerConfig(Config):
    """Several scorers, each of which gives a score of its own; what each counts is the caller's to say
    (orchestrator.algorithm.rewards)."""

    kind: Literal["several"]
    """Kind of the scorer."""
    scorers: Annotated[dict[ScoreName, "ScorerConfig"], Field(min_length=1)]
    """Name -> scorer. The scores of one that has names itself are called `name.its name`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores of a pair."""
        own = {name: scorer.names for name, scorer in self.scorers.items()}
        return tuple(f"{name}.{inner}" if inner else name for name in own for inner in own[name] or ("",))


ScorerConfig = Annotated[
    Union[ModelScorerConfig, FunctionScorerConfig, SeveralScorerConfig],  # noqa: UP007 - forward references
    Field(discriminator="kind"),
]


class RewardConfig(Config):
    """The scorer, and the tokenizer of the requests' token ids."""

    tokenizer: ModelPath
    """Folder of the tokenizer of the requests' token ids, usually the policy's."""
    scorer: ScorerConfig
    """The scorer; its `kind` is model, function or several."""
    max_length: Count = 4096
    """Longest prompt + response, in tokens; a model's own limit applies as well."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on waiting calls, their shares among callers, and the time of a pass."""


SeveralScorerConfig.model_rebuild()
RewardConfig.model_rebuild()
