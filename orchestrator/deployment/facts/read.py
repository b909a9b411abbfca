"""Reads a file of either kind: facts, or the whole file that Serve deploys."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.deployment.facts import scorers
from orchestrator.deployment.facts.derive import FUNCTION, TARGET, derive, stated
from orchestrator.deployment.facts.facts import TELLING, Facts
from orchestrator.deployment.facts.hub import Pinned
from quartet.config.base import ConfigError

if TYPE_CHECKING:
    from orchestrator.deployment.facts.model import ModelOnDisk

_WHOLE = "applications"
"""The section by which a file is known to be whole."""
_REQUIRED = ("name", "model", "reward", "prompts", "algorithm")
_OF_A_TRAINING = "data"
"""The key by which a file of `quartet sft` or `quartet reward-model` is known."""


def states_facts(raw: Mapping[str, Any], path: str | Path) -> bool:
    """True for a file of facts, false for a whole one.

    Raises:
        ConfigError: it has sections of both, or of neither.
    """
    if _OF_A_TRAINING in raw and not raw.keys() & {_WHOLE, "orchestrator", *_REQUIRED[2:]}:
        raise ConfigError(
            f"{path}: is a file of `quartet sft` or `quartet reward-model`, by its key {_OF_A_TRAINING}; these check "
            f"it as they start. A run of PPO has the facts {', '.join(_REQUIRED)}"
        )
    if not (stating := {*TELLING, scorers.TELLING} & raw.keys()):
        if not raw.keys() & {_WHOLE, "orchestrator"}:
            holds = ", ".join(map(str, raw)) or "nothing"
            raise ConfigError(
                f"{path}: should state the facts {', '.join(_REQUIRED)}, or {scorers.TELLING} alone, or be a whole "
                f"file with {_WHOLE}, and for a run orchestrator; it holds {holds}"
            )
        return False
    if _WHOLE in raw:
        raise ConfigError(
            f"{path}: {', '.join(sorted(stating))} are facts, from which applications are derived, and "
            f"{_WHOLE} is of a whole file; keep one kind (`quartet render` makes the second of the first)"
        )
    return True


def derived(raw: Mapping[str, Any], path: str | Path, pinned: Pinned | None = None) -> dict[str, Any]:
    """The whole file of a file of facts, whose models and data are fetched first where they are not there.

    Args:
        raw: the facts.
        path: the file, beside which its lock is.
        pinned: models and data sets of a hub; None: those of Hugging Face's.

    Raises:
        ConfigError: a line for each wrong fact.
    """
    pinned = pinned or Pinned.beside(Path(path))
    if not TELLING & raw.keys():
        alone = scorers.ScorersFacts.parse({key: value for key, value in raw.items() if key != "shared"}, "")
        return scorers.derive(_fetched_scorers(alone, pinned), _model_at)
    facts = fetched(Facts.of(raw), pinned)
    try:
        return derive(facts, _model_at)
    except ConfigError as error:
        raise ConfigError(stated(str(error))) from None


def fetched(facts: Facts, pinned: Pinned) -> Facts:
    """The facts with folders in the place of ORG/NAME@REVISION and ORG/NAME@REVISION/FOLDER."""
    data = pinned.place(facts.prompts.path, "dataset", "prompts.path")
    reward = facts.reward
    if not isinstance(reward, str) or not TARGET.fullmatch(reward):
        reward = _scorer(reward, "reward", pinned)
    return facts.model_copy(
        update={
            "model": pinned.place(facts.model, "model", "model"),
            "reward": reward,
            "critic": facts.critic and pinned.place(facts.critic, "model", "critic"),
            "prompts": facts.prompts.model_copy(update={"path": data}),
            "services": _within(facts.services, "services", pinned),
        }
    )


def _fetched_scorers(facts: scorers.ScorersFacts, pinned: Pinned) -> scorers.ScorersFacts:
    """The same of scorers without a run."""
    found = {name: _scorer(given, f"scorers.{name}", pinned) for name, given in facts.scorers.items()}
    tokenizer = facts.tokenizer and pinned.place(facts.tokenizer, "model", "tokenizer")
    return facts.model_copy(update={"scorers": found, "tokenizer": tokenizer})


def _scorer(given: Any, field: str, pinned: Pinned) -> Any:
    if not isinstance(given, str):
        return _within(given, field, pinned)
    return given if FUNCTION.fullmatch(given) else pinned.place(given, "model", field)


def _within(value: Any, field: str, pinned: Pinned) -> Any:
    if isinstance(value, Mapping):
        # The `model` of a scorer of another kind, such as a judge, is a name at its endpoint.
        kept = set() if value.get("kind", "model") == "model" else {"model"}
        return {
            key: inner if key in kept else _within(inner, f"{field}.{key}", pinned) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_within(inner, field, pinned) for inner in value]
    is_model = isinstance(value, str) and field.rpartition(".")[2] in ("model", "tokenizer")
    return pinned.place(value, "model", field) if is_model else value


@functools.cache
def _model_at(folder: str, field: str) -> "ModelOnDisk":
    # Imported here because it loads torch, which takes seconds that an error in the facts need not wait for.
    from orchestrator.deployment.facts.model import ModelOnDisk

    return ModelOnDisk.at(folder, field)
