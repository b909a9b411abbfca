"""The folder of a run, in which one process at a time works."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.lock import held
from orchestrator.monitoring.metrics import CHECKPOINTS, FILE, read_metrics
from quartet.config.base import ConfigError
from quartet.config.explain import shown
from quartet.folders import replace_file, unusable
from quartet.wire.run_id import new_run_id

RUNS = Path("runs")
RUN_ID = "run_id"
"""Name of the file, in a run's folder, with the run's id."""


def check_beginning(*, overwrite: bool, resume: bool) -> None:
    """Raises ConfigError if a run is to begin again and to go on."""
    if overwrite and resume:
        raise ConfigError("--overwrite starts again and --resume continues; give one of them")


@contextmanager
def locked(run_dir: Path, checkpoints: Path) -> Iterator[None]:
    """Holds the run's lock. It ends with the process, however that ends. The lock of the checkpoints lies beside
    their folder, which is made and removed with them.

    Raises:
        ConfigError: another process holds it, or a folder cannot be made or written to.
    """
    files = {run_dir: run_dir / ".lock", checkpoints: checkpoints.with_name(f".{checkpoints.name}.lock")}
    with contextlib.ExitStack() as opened:
        for folder, path in files.items():
            if problem := unusable(path.parent):
                raise ConfigError(f"{folder} cannot be made: {problem}")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                opened.enter_context(held(path, timeout_s=0))
            except TimeoutError:
                raise ConfigError(f"{folder} is in use by another training process; stop it or wait for it") from None
        yield


def checkpoint_folder(config: OrchestratorConfig) -> Path:
    """The absolute folder of checkpoints; absolute because learners have other working directories."""
    checkpoint = config.checkpoint
    return Path(checkpoint.folder or Path(checkpoint.root) / config.name / CHECKPOINTS).resolve()


def policy_folder(config: OrchestratorConfig) -> Path:
    """The folder of the trained policy."""
    return Path(config.save or RUNS / config.name / "policy")


def check_untrained(run_dir: Path, checkpoints: Path) -> None:
    """Raises ConfigError if a run that has no checkpoint was trained: to resume it would be to begin again, and to
    replace what it has."""
    metrics = run_dir / FILE
    if metrics.exists() and any(line["step"] > 0 for line in read_metrics(metrics)):
        raise ConfigError(
            f"{run_dir} was trained, but {checkpoints} holds no checkpoint: was checkpoint.every 0, or are "
            "they elsewhere? --overwrite starts again"
        )


def run_id(run_dir: Path, *, resume: bool) -> str:
    """The id by which services know this run: on resuming the one in its folder, otherwise a new one."""
    if resume:
        with contextlib.suppress(FileNotFoundError):
            if kept := (run_dir / RUN_ID).read_text(encoding="utf-8").strip():
                return kept
    return new_run_id(run_dir.name)


def keep_run_id(run_dir: Path, run_id: str) -> None:
    """Writes the run's id to its folder, for resuming."""
    replace_file(run_dir / RUN_ID, f"{run_id}\n".encode())


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """Changes of a configuration, a line for each key; sections in a list are compared by their names."""
    changes: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        old, new, path = _by_name(before.get(key)), _by_name(now.get(key)), f"{where}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += differences(old, new, f"{path}.")
        elif old != new:
            changes.append(f"{path}: {shown(old)} before, {shown(new)} now")
    return changes


def _by_name(value: Any) -> Any:
    """A list of sections that each have a name of their own, such as applications, as a mapping; another value as it
    is."""
    if not (isinstance(value, list) and all(isinstance(each, Mapping) and "name" in each for each in value)):
        return value
    named = {str(each["name"]): each for each in value}
    return named if value and len(named) == len(value) else value
