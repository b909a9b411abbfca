import errno
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.config.run import LogConfig
from orchestrator.monitoring.metrics import (
    MetricsLog,
    TensorBoardSink,
    WandbSink,
    evaluated_steps,
    judge_names,
    load_wandb,
    read_metrics,
)
from quartet.config.base import ConfigError
from tests.unit.runs_on_disk import evaluate, sample

QUIET = LogConfig(tensorboard=False)


class FakeSink:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.written.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


class BrokenSink(FakeSink):
    def close(self) -> None:
        raise OSError("gone")


class FakeWandb:
    """The module and its run in one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **arguments: Any) -> "FakeWandb":
        self.calls.append(("init", arguments))
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", (metrics, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_each_step_is_one_line_written_at_once_and_handed_on(tmp_path: Path) -> None:
    path, sink = tmp_path / "metrics.jsonl", FakeSink()
    times = iter([1000.5, 1001.23456])
    with MetricsLog(path, [sink], clock=lambda: next(times)) as log:
        log.write(0, {"eval/score": -0.25})
        log.write(1, {"score/mean": np.float64(0.5), "policy/version": 1})
        # Not yet closed, and yet on disk.
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 0, "time": 1000.5, "eval/score": -0.25},
        {"step": 1, "time": 1001.235, "score/mean": 0.5, "policy/version": 1.0},
    ]
    assert sink.written == [(0, {"eval/score": -0.25}), (1, {"score/mean": 0.5, "policy/version": 1.0})]
    assert sink.closed


def test_what_is_not_finite_is_null_on_disk_and_nan_when_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"a": math.nan, "b": math.inf, "c": 2.0})
    assert '"a": null, "b": null, "c": 2.0' in path.read_text()
    (line,) = read_metrics(path)
    assert math.isnan(line["a"])
    assert math.isnan(line["b"])
    assert line["c"] == 2.0


def test_names_that_the_line_has_already_are_refused(tmp_path: Path) -> None:
    with (
        MetricsLog(tmp_path / "metrics.jsonl") as log,
        pytest.raises(ValueError, match="metrics: step, time cannot be the name of a metric"),
    ):
        log.write(1, {"time": 1.0, "step": 2.0, "loss": 3.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_is_named_by_the_file_that_it_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised, MetricsLog(path) as log:
        log.write(1, {"loss": 3.0})
    assert raised.value.filename == str(path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = TensorBoardSink(tmp_path / "tensorboard")
    monkeypatch.setattr(sink, "_writer", SimpleNamespace(add_scalar=full, flush=full, close=full))
    with (
        pytest.raises(OSError, match="No space left") as raised,
        MetricsLog(tmp_path / "other.jsonl", [sink]) as log,
    ):
        log.write(1, {"loss": 3.0})
    assert raised.value.filename == str(tmp_path / "tensorboard")


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open(tmp_path: Path) -> None:
    first, last = FakeSink(), FakeSink()
    with pytest.raises(OSError, match="gone"):
        MetricsLog(tmp_path / "metrics.jsonl", [first, BrokenSink(), last]).close()
    assert first.closed
    assert last.closed


def test_reading_leaves_out_a_line_cut_short_and_refuses_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 2}\n{"step": 2, "ti')
    assert read_metrics(path) == [{"step": 1, "time": 2}]
    path.write_text('{"step": 1, "time": 2}\n{"step": 2, "ti\n{"step": 3, "time": 4}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: not valid JSON: "):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"line 1: should be a JSON object, got \[1\]"):
        read_metrics(path)
    with pytest.raises(ConfigError, match=r"none.jsonl: no such file; is .* the folder of a run\?"):
        read_metrics(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe\x00", "not valid JSON: "),
        (b"", "not valid JSON: "),
        (b'{"step": 12345678901234567}', "not valid JSON: a whole number with too many digits"),
        (b'{"time": 2}', "step: required"),
        (b'{"step": 1}', "time: required"),
        (b'{"step": null, "time": 2}', "step: should be a whole number, 0 or more, got null"),
        (b'{"step": -1, "time": 2}', "step: should be a whole number, 0 or more, got -1"),
        (b'{"step": 1.5, "time": 2}', "step: should be a whole number, 0 or more, got 1.5"),
        (b'{"step": 1, "time": null}', "time: should be seconds since 1970, got null"),
        (b'{"step": 1, "time": 1e300}', "time: should be seconds since 1970, got 1e+300"),
        (b'{"step": 1, "time": 2, "score/mean": "x"}', "score/mean: should be a number or null, got 'x'"),
    ],
)
def test_a_line_that_no_log_writes_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "time": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        read_metrics(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")


def test_open_keeps_the_configuration_and_writes_tensorboard(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    with MetricsLog.open(run, LogConfig(), {"name": "demo", "betas": (0.9, 0.95)}) as log:
        log.write(3, {"score/mean": 0.5})
    assert yaml.safe_load((run / "config.yaml").read_text()) == {"name": "demo", "betas": [0.9, 0.95]}
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("score/mean")
    assert (event.step, event.value) == (3, 0.5)


def earlier_run(run: Path) -> None:
    for name in ("tensorboard/events", "evaluations/step-000000.jsonl", "report.html", "policy/config.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("old")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 2}\n')


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    message = f"{tmp_path} already holds a run; choose another name, --resume it, or --overwrite"
    with pytest.raises(ConfigError, match=re.escape(message)):
        MetricsLog.open(tmp_path, QUIET, {})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "time": 2}]
    assert (tmp_path / "report.html").exists()


def test_overwrite_removes_the_measurements_of_the_earlier_run_and_nothing_else(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    MetricsLog.open(tmp_path, QUIET, {}, overwrite=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl", "policy"]
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_evaluations_without_a_run_are_kept(tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    MetricsLog.open(tmp_path, QUIET, {}).close()
    assert (tmp_path / "evaluations").is_dir()


def test_wandb_is_given_the_run_and_its_metrics(tmp_path: Path) -> None:
    wandb = FakeWandb()
    sink = WandbSink(wandb, "quartet", tmp_path, {"seed": 1})
    sink.write(2, {"score/mean": 0.5})
    sink.close()
    kept = (tmp_path / "wandb-id").read_text()
    place = {"project": "quartet", "name": tmp_path.name, "dir": str(tmp_path)}
    assert wandb.calls == [
        ("init", place | {"config": {"seed": 1}, "id": kept, "resume": "allow"}),
        ("log", ({"score/mean": 0.5}, 2)),
        ("finish", None),
    ]


def test_a_resumed_run_is_the_same_one_to_wandb(tmp_path: Path) -> None:
    runs = [FakeWandb(), FakeWandb()]
    for run in runs:
        WandbSink(run, "quartet", tmp_path, {}).close()
    assert runs[0].calls[0][1]["id"] == runs[1].calls[0][1]["id"]


@pytest.mark.parametrize(("after", "kept"), [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_a_resumed_run_forgets_what_it_measured_after_its_checkpoint(
    tmp_path: Path, after: int, kept: list[int]
) -> None:
    with MetricsLog.open(tmp_path, QUIET, {}) as log:
        for step in range(4):
            log.write(step, {"score/mean": step / 3})
            evaluate(tmp_path, step, [sample(0, score=step)])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 1, "sco')  # killed while it wrote
    with MetricsLog.open(tmp_path, QUIET, {}, resume_after=after) as log:
        assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == kept
        assert [*evaluated_steps(tmp_path / "evaluations")] == kept
        log.write(after + 1, {})
    # What stays is what was there, byte for byte.
    assert before.startswith(b"".join((tmp_path / "metrics.jsonl").read_bytes().splitlines(True)[:-1]))


def test_a_run_that_measured_nothing_yet_is_resumed(tmp_path: Path) -> None:
    with MetricsLog.open(tmp_path / "run", QUIET, {}, resume_after=-1) as log:
        log.write(0, {})
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1


def test_wandb_that_is_not_installed_is_named_before_anything_is_removed(tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    earlier_run(tmp_path)
    message = (
        "log.wandb_project is set, but wandb is not installed; install it with "
        "`uv pip install -e '.[wandb]'` in Quartet's folder, or set log.wandb_project to null"
    )
    config = LogConfig(tensorboard=False, wandb_project="quartet")
    with pytest.raises(ConfigError, match=re.escape(message)):
        MetricsLog.open(tmp_path, config, {}, overwrite=True, load=missing)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "time": 2}]
    wandb = FakeWandb()
    MetricsLog.open(tmp_path, config, {}, overwrite=True, load=lambda name: wandb).close()
    assert [name for name, _ in wandb.calls] == ["init", "finish"]
    assert load_wandb(lambda name: name) == "wandb"


def test_judges_are_what_an_evaluation_does_not_measure_itself() -> None:
    names = ["eval/score", "eval/score_low", "eval/score_high", "eval/kl", "eval/length", "eval/truncated"]
    assert judge_names([*names, "eval/score/right", "eval/score/right_low", "eval/task/sums/score"]) == []
    assert judge_names(["eval/gold_low", "eval/gold", "score/mean", "eval/gold_high", *names, "eval/sentiment"]) == [
        "gold",
        "sentiment",
    ]
