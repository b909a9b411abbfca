"""The algorithms that a file may name, a row each."""

from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.grpo import GRPO
from orchestrator.algorithms.ppo import PPO
from orchestrator.algorithms.reinforce_pp import ReinforcePP
from orchestrator.algorithms.rloo import RLOO
from quartet.config.base import Config

DEFAULT = PPO()
"""The algorithm of a file that names none."""

Rows = (
    Annotated[PPO, Tag("ppo")]
    | Annotated[RLOO, Tag("rloo")]
    | Annotated[ReinforcePP, Tag("reinforce++")]
    | Annotated[GRPO, Tag("grpo")]
)  # fmt: skip
"""A row for each algorithm, with its kind."""


def kind(section: Any) -> Any:
    """The kind of a section as it is read, or of an algorithm."""
    given = section.get("kind", DEFAULT.kind) if isinstance(section, dict) else getattr(section, "kind", DEFAULT.kind)
    return given if isinstance(given, str) else str(given)


AnyAlgorithm = Annotated[Rows, Discriminator(kind)]
"""The section `algorithm:`, whose `kind` names one of them."""


def algorithms() -> dict[str, type[Algorithm]]:
    """Kind -> class, in the order of the rows."""
    classes = (get_args(row)[0] for row in get_args(Rows))
    return {each.model_fields["kind"].default: each for each in classes}


def kinds(*, critic: bool) -> str:
    """The kinds that train a critic, or those that do not, as a sentence names them: `a, b or c`."""
    *first, last = (name for name, each in algorithms().items() if each.needs_critic is critic)
    return f"{', '.join(first)} or {last}" if first else last


class _Section(Config):
    """The section on its own."""

    algorithm: AnyAlgorithm = DEFAULT
    """The algorithm."""


def parse(values: Any) -> Algorithm:
    """The algorithm of the section `algorithm:`; of None, as where there is none, the default. ConfigError names each
    wrong field."""
    return _Section.parse({} if values is None else {"algorithm": values}, "").algorithm
