"""Runs of `quartet train` on the shared quartet that may be killed and begun again."""

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import yaml
from safetensors.torch import load_file

from orchestrator.experience.experience import SCHEMA
from orchestrator.monitoring.metrics import read_metrics
from quartet.columns import Columns, Schema
from tests.cluster import Quartet, eventually, whole
from tests.commands import PATIENCE_S, Command
from tests.environments import HELD, HOLD

STEPS, EVERY = 8, 2


class Run:
    """One run, whose process may be killed and started again."""

    def __init__(self, quartet: Quartet, name: str, without: Collection[str] = (), **algorithm: Any) -> None:
        """`without` names applications to leave out of its file, `algorithm` holds keys of the algorithm."""
        self.quartet = quartet
        self.folder = quartet.folder / "runs" / name
        self.config = quartet.folder / f"{name}.yaml"
        raw: dict[str, Any] = quartet.raw | {"orchestrator": quartet.raw["orchestrator"] | {"name": name}}
        # Everything is kept, so that another run can begin where this one did, with the samples that it had.
        kept = raw["orchestrator"]["checkpoint"] | {"every": EVERY, "keep": 100}
        raw["orchestrator"] |= {"steps": STEPS, "checkpoint": kept}
        raw["orchestrator"] |= {"evaluation": {"every": 0}, "algorithm": raw["orchestrator"]["algorithm"] | algorithm}
        raw["applications"] = [each for each in raw["applications"] if each["name"] not in without]
        self.config.write_text(yaml.safe_dump(raw))
        self.log = quartet.folder / f"{name}.log"
        self.processes: list[Command] = []

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Context that gives the contents of its file, and writes what became of them."""
        raw: dict[str, Any] = yaml.safe_load(self.config.read_text())
        yield raw
        self.config.write_text(yaml.safe_dump(raw))

    def take_samples(self, other: "Run", *folders: str) -> None:
        """Lets it begin as the other run did, with the same policy, critic and samples, or with these folders."""
        for folder in folders or ("checkpoints/step-000000", "journal"):
            shutil.copytree(other.folder / folder, self.folder / folder)

    def finish(self, *options: str) -> None:
        before = self.log.stat().st_size if self.log.exists() else 0
        assert self.start(*options).wait(PATIENCE_S) == 0, self.log.read_bytes()[before:].decode()

    def start(self, *options: str) -> Command:
        process = Command(self.quartet.folder, self.log, "train", str(self.config), *options)
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Whatever a failed test left running."""
        for process in self.processes:
            process.kill()
            process.wait()

    def killed(self, when: Callable[[], bool], *options: str) -> None:
        """Starts it, and kills it at a moment of its life."""
        process = self.start(*options)
        self.wait(when, process, pause_s=0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait(self, when: Callable[[], bool], process: Command, pause_s: float = 0.02) -> None:
        end = time.monotonic() + PATIENCE_S
        while not when():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(pause_s)

    def steps(self) -> list[int]:
        """Steps that were measured so far."""
        metrics = self.folder / "metrics.jsonl"
        return [int(line["step"]) for line in read_metrics(metrics)] if metrics.exists() else []

    def reached(self, step: int) -> Callable[[], bool]:
        return lambda: step in self.steps()

    def interrupted(self, times: int) -> Callable[[], bool]:
        """A check that the run has gone back to a checkpoint so many times, by its log."""
        return lambda: self.log.read_text().count("interrupted (") == times

    def measured(self) -> list[dict[str, float]]:
        """All but the times, and the proofs of pushes, of which a resumed run has more."""
        return [
            {
                name: value
                for name, value in line.items()
                if not name.startswith(("seconds/", "tokens_per_s/", "time", "wait/", "work/", "push/"))
            }
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]


async def finish_held(run: Run, count: int, kill: Callable[[], None]) -> None:
    """Carries the run out, and calls `kill` as soon as so many of its conversations are held (tests.environments).
    Returns when all rollout replicas are there again."""
    hold, held = run.quartet.folder / HOLD, run.quartet.folder / HELD
    hold.touch()
    process = run.start()
    try:

        async def all_wait() -> bool:
            assert process.poll() is None, run.log.read_text()
            return held.exists() and len(held.read_text().splitlines()) >= count

        await eventually(all_wait, PATIENCE_S)
        kill()
        hold.unlink()
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0, run.log.read_text()
    finally:
        hold.unlink(missing_ok=True)
        held.unlink(missing_ok=True)
        run.end()
    await whole(run.quartet, run.quartet.rollout_replicas)


def assert_same(run: Run, straight: Run, but: tuple[str, ...] = ()) -> None:
    """The same weights and measurements, bit for bit, but for those whose names begin so."""
    actual, wanted = (
        [{name: value for name, value in line.items() if not name.startswith(but)} for line in one.measured()]
        for one in (run, straight)
    )
    assert actual == wanted
    weights, others = (load_file(one.folder / "policy" / "model.safetensors") for one in (run, straight))
    assert weights.keys() == others.keys()
    assert all((weights[name] == others[name]).all() for name in others)


def written(run: Run) -> list[dict[str, Any]]:
    """The contents of the journal's files, one for each step."""
    return [msgpack.unpackb(path.read_bytes()) for path in sorted((run.folder / "journal").glob("step-*.msgpack"))]


def journal(run: Run, schema: Schema = SCHEMA) -> list[Columns]:
    """The trajectories that each step was trained on."""
    return [Columns.unpack(each["columns"], schema) for each in written(run)]


def write_rows(quartet: Quartet, name: str, rows: Iterable[Mapping[str, str]]) -> Path:
    """Writes a file of prompts."""
    path = quartet.folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_replayed(again: Run, straight: Run) -> None:
    """The other run's first checkpoint and journal give the same weights, measurements and samples, bit for bit."""
    again.take_samples(straight)
    try:
        again.finish("--resume")
        assert_same(again, straight)
        assert [each.pack() for each in journal(again)] == [each.pack() for each in journal(straight)]
    finally:
        again.end()
