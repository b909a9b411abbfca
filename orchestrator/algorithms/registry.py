"""The algorithms that a file may name, a row each."""

from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from orchestrator.algorithms.cispo import CISPO
from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.dapo import DAPO
from orchestrator.algorithms.distil import Distil
from orchestrator.algorithms.dr_grpo import DrGRPO
from orchestrator.algorithms.grpo import GRPO
from orchestrator.algorithms.gspo import GSPO
from orchestrator.algorithms.ppo import PPO
from orchestrator.algorithms.reinforce_pp import ReinforcePP
from orchestrator.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from orchestrator.algorithms.rloo import RLOO
from orchestrator.algorithms.sao import SAO
from quartet.config.base import Config

DEFAULT = PPO()
"""The algorithm of a file that names none."""

Rows = (
    Annotated[PPO, Tag("ppo")]
    | Annotated[RLOO, Tag("rloo")]
    | Annotated[ReinforcePP, Tag("reinforce++")]
    | Annotated[ReinforcePPBaseline, Tag("reinforce++-baseline")]
    | Annotated[GRPO, Tag("grpo")]
    | Annotated[DrGRPO, Tag("dr-grpo")]
    | Annotated[DAPO, Tag("dapo")]
    | Annotated[GSPO, Tag("gspo")]
    | Annotated[CISPO, Tag("cispo")]
    | Annotated[SAO, Tag("sao")]
    | Annotated[Distil, Tag("distil")]
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


def presets() -> dict[str, Algorithm]:
    """Kind -> the algorithm of a file that names the kind alone."""
    return {kind: each.model_validate({}) for kind, each in algorithms().items()}


def kinds(*, critic: bool) -> str:
    """The kinds that train a critic, or those that do not, as a sentence names them: `a, b or c`."""
    *first, last = (name for name, each in presets().items() if each.needs_critic is critic)
    return f"{', '.join(first)} or {last}" if first else last


class _Section(Config):
    """The section on its own."""

    algorithm: AnyAlgorithm = DEFAULT
    """The algorithm."""


def parse(values: Any) -> Algorithm:
    """The algorithm of the section `algorithm:`; of None, as where there is none, the default. ConfigError names each
    wrong field."""
    return _Section.parse({} if values is None else {"algorithm": values}, "").algorithm
