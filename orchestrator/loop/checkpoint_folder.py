"""The folder of a run's checkpoints: the complete ones in it, and the names inside each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from pydantic import ValidationError

from orchestrator.loop.state import TrainState
from quartet.config.base import Config, ConfigError
from quartet.folders import remove

STATE = "state.json"
PREFIX = "step-"


State = TypeVar("State", bound=Config)


@dataclass(frozen=True, slots=True)
class Checkpoint(Generic[State]):
    """A complete checkpoint."""

    folder: Path
    state: State


@overload
def latest(folder: Path) -> Checkpoint[TrainState] | None: ...


@overload
def latest(folder: Path, kind: type[State]) -> Checkpoint[State] | None: ...


def latest(folder: Path, kind: type[Any] = TrainState) -> Checkpoint[Any] | None:
    """The newest checkpoint in `folder`, or None; its state is of this kind.

    Raises:
        ConfigError: its state cannot be read.
    """
    if not (checkpoints := complete(folder)):
        return None
    path = checkpoints[-1] / STATE
    try:
        return Checkpoint(checkpoints[-1], kind.model_validate_json(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{path}: cannot be read as a checkpoint's state ({error}); remove {checkpoints[-1]} to resume from "
            "the one before"
        ) from None


def clear(folder: Path, *, overwrite: bool) -> None:
    """Removes the checkpoints of an earlier run.

    Raises:
        ConfigError: the folder holds checkpoints and `overwrite` is False.
    """
    if (checkpoints := complete(folder)) and not overwrite:
        raise ConfigError(f"{folder} already holds checkpoints; choose another name, --resume them, or --overwrite")
    for old in checkpoints:
        remove(old)


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    candidates = (path.parent for path in folder.glob(f"{PREFIX}*/{STATE}"))
    return sorted((path for path in candidates if path.name.removeprefix(PREFIX).isdecimal()), key=number)


def number(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))
