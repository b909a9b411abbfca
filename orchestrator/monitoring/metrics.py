"""A run's metrics, written once to runs/<name>/metrics.jsonl and copied to TensorBoard and W&B.

Names are flat, with slashes: `score/mean`, `policy/loss`, `seconds/train`, `eval/score`. One line holds all metrics
of one step; step 0 is the evaluation before training.
"""

import importlib
import json
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import yaml

from orchestrator.config.evaluation import BOUNDS, MEASURED, NAMED
from orchestrator.config.run import LogConfig
from orchestrator.monitoring.jsonl import parse_object, whole
from quartet.config.base import ConfigError
from quartet.config.explain import shown
from quartet.folders import naming, replace_file

FILE = "metrics.jsonl"
CHECKPOINTS, JOURNAL, TRACE, EVALUATIONS = "checkpoints", "journal", "trace.json", "evaluations"
RUN_LOG = "run.log"
_RUN_OUTPUTS = (FILE, RUN_LOG, TRACE, "tensorboard", EVALUATIONS, "report.html", CHECKPOINTS, JOURNAL, "wandb-id")
_EVALUATION = re.compile(r"step-([0-9]+)\.jsonl")
_YEAR_10000 = 253_402_300_800


class Sink(Protocol):
    """A further destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Appends to a metrics.jsonl and its sinks. Closing it closes them all."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = (), clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the seconds since 1970 that each line records."""
        self._sinks, self._clock, self._resources = sinks, clock, ExitStack()
        for sink in sinks:
            self._resources.callback(sink.close)
        # Closing writes again what a full disk did not take.
        self._resources.enter_context(naming(path))
        self._file = self._resources.enter_context(path.open("a", encoding="utf-8"))

    @classmethod
    def open(
        cls,
        run_dir: Path,
        config: LogConfig,
        run_config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        resume_after: int | None = None,
        load: Callable[[str], Any] = importlib.import_module,
    ) -> Self:
        """Starts the log of a new run or continues a resumed run's, and writes `run_config` beside it as config.yaml.

        Args:
            run_config: the run's configuration in plain YAML types.
            overwrite: True to remove an earlier run's results from `run_dir`.
            resume_after: continue the log of the run there, without its lines and its evaluations' samples after this
                step; -1 removes all.
            load: imports a module by name.

        Raises:
            ConfigError: `run_dir` already holds a run, or W&B is configured but not installed. Nothing is removed.
        """
        wandb = load_wandb(load) if config.wandb_project is not None else None
        if resume_after is None:
            _clear(run_dir, overwrite)
        run_dir.mkdir(parents=True, exist_ok=True)
        written = yaml.safe_dump(dict(run_config), sort_keys=False, allow_unicode=True)
        replace_file(run_dir / "config.yaml", written.encode())
        if resume_after is not None:
            _forget_evaluations(run_dir / EVALUATIONS, resume_after)
            _rewind(run_dir / FILE, resume_after)
        sinks: list[Sink] = []
        if config.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_after))
        if config.wandb_project is not None:
            sinks.append(WandbSink(wandb, config.wandb_project, run_dir, run_config))
        return cls(run_dir / FILE, sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line, and passes it to the sinks at once. Numbers that are not finite are written as null.

        Raises:
            ValueError: a metric is named `step` or `time`, which every line has already.
            OSError: the file cannot be written, such as on a full disk; it names the file.
        """
        if taken := {"step", "time"} & metrics.keys():
            raise ValueError(f"metrics: {', '.join(sorted(taken))} cannot be the name of a metric")
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "time": round(self._clock(), 3), **finite}
        with naming(Path(self._file.name)):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Closes the file and the sinks."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoardSink:
    """Event files that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        # TensorBoard hides earlier events from purge_step on.
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with naming(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        with naming(self._folder):
            self._writer.close()


class WandbSink:
    """A Weights & Biases run, named after the run's folder."""

    def __init__(self, wandb: Any, project: str, run_dir: Path, run_config: Mapping[str, Any]) -> None:
        # Uses the same id on resuming, so that it stays one run.
        kept = run_dir / "wandb-id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(8), encoding="utf-8")
        place = {"project": project, "name": run_dir.name, "dir": str(run_dir)}
        self._run = wandb.init(**place, config=dict(run_config), id=kept.read_text(encoding="utf-8"), resume="allow")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, null as NaN. A last line that a crash cut short is left out.

    Raises:
        ConfigError: the file is missing, or a line before the last is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; is {path.parent} the folder of a run?")
    # The writer ends each line with a newline, so text after the last newline was cut short.
    *lines, _ = path.read_bytes().split(b"\n")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def judge_names(names: Iterable[str]) -> list[str]:
    """Names of the judges among metric names; for example `eval/gold` and `eval/gold_low` give gold, and
    `eval/score/right` none."""
    evaluated = dict.fromkeys(name.removeprefix("eval/") for name in names if name.startswith("eval/"))
    return [
        name
        for name in evaluated
        if name not in MEASURED and not name.startswith(NAMED) and not name.endswith(BOUNDS)
    ]


def between(names: Iterable[str], before: str, after: str) -> list[str]:
    """The different parts of metric names between a beginning and an end: `score/right/mean` has `right` between
    `score/` and `/mean`."""
    held = (name for name in names if name.startswith(before) and name.endswith(after))
    return list(dict.fromkeys(name[len(before) : -len(after)] for name in held if len(name) > len(before + after)))


def _parse(line: bytes, where: str) -> dict[str, float]:
    raw = parse_object(line, where, parse_int=whole)
    if missing := [name for name in ("step", "time") if name not in raw]:
        raise ConfigError(f"{where}: {missing[0]}: required")
    values = {name: math.nan if value is None else value for name, value in raw.items()}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {name}: should be a number or null, got {shown(value)}")
    if not isinstance(raw["step"], int) or raw["step"] < 0:
        raise ConfigError(f"{where}: step: should be a whole number, 0 or more, got {shown(raw['step'])}")
    if not 0 <= values["time"] < _YEAR_10000:
        raise ConfigError(f"{where}: time: should be seconds since 1970, got {shown(raw['time'])}")
    return values


def _clear(run_dir: Path, overwrite: bool) -> None:
    """Removes an earlier run's results, or raises ConfigError if they may not be removed."""
    if not overwrite:
        if any((run_dir / name).exists() for name in (FILE, CHECKPOINTS)):
            raise ConfigError(f"{run_dir} already holds a run; choose another name, --resume it, or --overwrite")
        return
    for name in _RUN_OUTPUTS:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def evaluated_steps(folder: Path) -> dict[int, Path]:
    """Steps after which the run evaluated its policy, in order, and the file of each one's samples; files with other
    names are ignored."""
    files = {int(match[1]): file for file in folder.glob("step-*") if (match := _EVALUATION.fullmatch(file.name))}
    return dict(sorted(files.items()))


def _forget_evaluations(folder: Path, step: int) -> None:
    """Removes the samples of evaluations after `step`, which are another policy's than the resumed run will have."""
    for evaluated, file in evaluated_steps(folder).items():
        if evaluated > step:
            file.unlink()


def _rewind(path: Path, step: int) -> None:
    """Removes the lines after `step`, and a last line that a crash cut short."""
    lines = read_metrics(path) if path.exists() else []
    kept = path.read_bytes().split(b"\n")[: sum(line["step"] <= step for line in lines)] if lines else []
    replace_file(path, b"".join(line + b"\n" for line in kept))


def load_wandb(load: Callable[[str], Any]) -> Any:
    """The wandb module. ConfigError, which says how to install it, if it is missing."""
    try:
        return load("wandb")
    except ImportError:
        raise ConfigError(
            "log.wandb_project is set, but wandb is not installed; install it with "
            "`uv pip install -e '.[wandb]'` in Quartet's folder, or set log.wandb_project to null"
        ) from None
