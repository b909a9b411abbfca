"""Reads a file of either kind: facts, or the whole file that Serve deploys."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.deployment.facts.derive import FUNCTION, TARGET, Model, derive, stated
from orchestrator.deployment.facts.facts import TELLING, Facts
from orchestrator.deployment.facts.hub import Pinned
from quartet.config.base import ConfigError

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
    if not (stating := TELLING & raw.keys()):
        if not raw.keys() & {_WHOLE, "orchestrator"}:
            holds = ", ".join(map(str, raw)) or "nothing"
            raise ConfigError(
                f"{path}: should state the facts {', '.join(_REQUIRED)}, or be a whole file with {_WHOLE} and "
                f"orchestrator; it holds {holds}"
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
    facts = fetched(Facts.of(raw), pinned or Pinned.beside(Path(path)))
    try:
        return derive(facts, _model_at)
    except ConfigError as error:
        raise ConfigError(stated(str(error))) from None


def fetched(facts: Facts, pinned: Pinned) -> Facts:
    """The facts with folders in the place of ORG/NAME@REVISION and ORG/NAME@REVISION/FOLDER."""

    def model(place: str, field: str) -> str:
        known = Path(place).is_dir() or "@" not in place
        return place if known else pinned.folder(place, "model", field)

    def within(value: Any, field: str) -> Any:
        if isinstance(value, Mapping):
            return {key: within(inner, f"{field}.{key}") for key, inner in value.items()}
        if isinstance(value, list):
            return [within(inner, field) for inner in value]
        is_model = isinstance(value, str) and field.rpartition(".")[2] in ("model", "tokenizer")
        return model(value, field) if is_model else value

    prompts, reward = facts.prompts, facts.reward
    if "@" in prompts.path and not Path(prompts.path).exists():
        place = pinned.folder(prompts.path, "dataset", "prompts.path")
        prompts = prompts.model_copy(update={"path": place})
    if isinstance(reward, str):
        scores = FUNCTION.fullmatch(reward) or TARGET.fullmatch(reward)
        reward = reward if scores else model(reward, "reward")
    return facts.model_copy(
        update={
            "model": model(facts.model, "model"),
            "reward": within(reward, "reward") if isinstance(reward, Mapping) else reward,
            "critic": facts.critic and model(facts.critic, "critic"),
            "prompts": prompts,
            "services": within(facts.services, "services"),
        }
    )


@functools.cache
def _model_at(folder: str, field: str) -> Model:
    # Imported here because it loads torch, which takes seconds that an error in the facts need not wait for.
    from orchestrator.deployment.facts.model import Model as OnDisk

    return OnDisk.at(folder, field)
