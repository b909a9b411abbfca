"""Configuration of the reward service: the `args:` of its application in the YAML file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from quartet.config.base import Config, Count, ModelPath, matching
from quartet.config.frozen import FrozenConfig
from quartet.config.limits import LimitsConfig
from quartet.config.scores import ScoreName
from services.reward.kinds import AnyWorkerScorerConfig, OwnConfig

INGRESS = "Reward"
"""Name of the deployment that takes an application's calls."""
MAX_LENGTH = 4096
"""Longest pair in tokens, by default."""
DEFAULT_LIMITS = LimitsConfig()
ScorerName = Annotated[
    str,
    matching(rf"(?!{INGRESS}$)[A-Za-z][\w-]*", f"letters, digits, `_` and `-`, a letter first; not {INGRESS}"),
]
"""A name by which requests choose a scorer, and that of its deployment."""


class ModelScorerConfig(FrozenConfig, OwnConfig):
    """A Hugging Face sequence-classification model with one label."""

    kind: Literal["model"]
    """Kind of the scorer."""
    model: ModelPath
    """Folder of the model. Its tokenizer must equal the service's."""
    normalise: bool = True
    """Subtract `reward_mean` and divide by `reward_std` if the model's config.json has them."""

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the scores of a pair: none, as there is one."""


class SeveralScorerConfig(OwnConfig):
    """Several scorers as one, each of which gives a score of its own; what each counts is the caller's to say
    (orchestrator.algorithm.rewards)."""

    kind: Literal["several"]
    """Kind of the scorer."""
    scorers: Annotated[dict[ScoreName, "ScorerConfig"], Field(min_length=1)]
    """Name -> scorer. The scores of one that has names itself are called `name.its name`."""

    def _problems(self) -> Iterator[str]:
        for name, part in self.scorers.items():
            if given := sorted(part.model_fields_set & OwnConfig.model_fields.keys()):
                yield f"scorers.{name}.{given[0]}: belongs to the whole; set it beside `kind: several`"
            if getattr(part, "process", False):
                yield f"scorers.{name}.process: true, but scores with names are earned at the end of a response"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores of a pair."""
        own = {name: scorer.names for name, scorer in self.scorers.items()}
        return tuple(f"{name}.{inner}" if inner else name for name in own for inner in own[name] or ("",))


PartConfig = ModelScorerConfig | AnyWorkerScorerConfig
"""A single scorer, as each of several is in the end."""
ScorerConfig = Annotated[PartConfig | SeveralScorerConfig, Field(discriminator="kind")]


def parts_of(scorer: ScorerConfig, field: str) -> Iterator[tuple[str, PartConfig]]:
    """(field, scorer) of the scorer at `field`; of several as one, of each of them."""
    if isinstance(scorer, SeveralScorerConfig):
        for name, part in scorer.scorers.items():
            yield from parts_of(part, f"{field}.scorers.{name}")
    else:
        yield field, scorer


@dataclass(frozen=True, slots=True)
class Hosted:
    """A scorer with all that holds for it."""

    scorer: ScorerConfig
    tokenizer: str | None
    """Folder of its tokenizer; None for one that takes no token ids."""
    max_length: int = MAX_LENGTH
    limits: LimitsConfig = DEFAULT_LIMITS


class RewardConfig(Config):
    """One scorer, or several by name; and what holds for those that do not say it themselves."""

    scorer: ScorerConfig | None = None
    """The only scorer; its `kind` is model, function, several, or one of those of docs/rewards.md."""
    scorers: dict[ScorerName, ScorerConfig] = Field(default_factory=dict)
    """Name -> scorer, in the place of `scorer`: requests choose one by its name. Each of several is a deployment of
    its name, whose replicas and resources `deployments:` sets, beside `Reward`, which takes the calls. A scorer's own
    `tokenizer`, `max_length` and `limits` count before those below."""
    tokenizer: ModelPath | None = None
    """Folder of the tokenizer of the requests' token ids, usually the policy's. Null: a model scorer's own; other
    scorers then take texts and conversations alone."""
    max_length: Count = MAX_LENGTH
    """Longest prompt + response, in tokens; a model's own limit applies as well."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on waiting calls, their shares among callers, and the time of a pass."""

    def _problems(self) -> Iterator[str]:
        if bool(self.scorer) == bool(self.scorers):
            yield "scorer: give this or scorers, one of them"

    @property
    def hosted(self) -> Mapping[str, Hosted]:
        """Name -> scorer; the only one of `scorer` has an empty name."""
        named = self.scorers if self.scorer is None else {"": self.scorer}
        return {
            name: Hosted(
                scorer,
                scorer.tokenizer or self.tokenizer or _own_tokenizer(scorer),
                scorer.max_length or self.max_length,
                scorer.limits or self.limits,
            )
            for name, scorer in named.items()
        }

    def only(self, name: str) -> Self:
        """The section with one of its scorers."""
        return self.model_copy(update={"scorers": {name: self.scorers[name]}})


def field_of(name: str) -> str:
    """The key of `args:` at which the scorer of this name stands."""
    return f"scorers.{name}" if name else "scorer"


def _own_tokenizer(scorer: ScorerConfig) -> str | None:
    """The folder of the scorer's first model, which has a tokenizer; None if it has no model."""
    return next((part.model for _, part in parts_of(scorer, "") if isinstance(part, ModelScorerConfig)), None)


SeveralScorerConfig.model_rebuild()
RewardConfig.model_rebuild()
