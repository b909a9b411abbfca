"""Runs that are killed, or that lose a learner: `quartet train` and the services, and processes really killed."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from orchestrator.checkpoint import latest
from orchestrator.metrics import read_metrics
from protos import rollout_pb2 as pb
from tests.cluster import REPO, Quartet, command, engine_of, named, rollouts

STEPS, EVERY = 8, 2
PATIENCE_S = 120


class Run:
    """One run, whose process may be killed and begun anew."""

    def __init__(self, quartet: Quartet, name: str) -> None:
        self.quartet = quartet
        self.folder = quartet.folder / "runs" / name
        self.config = quartet.folder / f"{name}.yaml"
        raw: dict[str, Any] = quartet.raw | {"orchestrator": quartet.raw["orchestrator"] | {"name": name}}
        # Everything is kept, so that another run can begin where this one did, with the samples that it had.
        raw["orchestrator"] |= {"steps": STEPS, "checkpoint": {"every": EVERY, "keep": 100}}
        raw["orchestrator"]["evaluation"] = {"every": 0}
        self.config.write_text(yaml.safe_dump(raw))
        self.log = quartet.folder / f"{name}.log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def finish(self, *options: str) -> None:
        done = command(self.quartet.folder, "train", str(self.config), *options)
        assert done.returncode == 0, done.stderr

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("quartet")), "train", str(self.config), *options],
                cwd=self.quartet.folder,
                env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
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

    def wait(self, when: Callable[[], bool], process: subprocess.Popen[bytes], pause_s: float = 0.02) -> None:
        end = time.monotonic() + PATIENCE_S
        while not when():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(pause_s)

    def steps(self) -> list[int]:
        """Those that were measured so far."""
        metrics = self.folder / "metrics.jsonl"
        return [int(line["step"]) for line in read_metrics(metrics)] if metrics.exists() else []

    def reached(self, step: int) -> Callable[[], bool]:
        return lambda: step in self.steps()

    def measured(self) -> list[dict[str, float]]:
        """All but the times."""
        return [
            {
                name: value
                for name, value in line.items()
                if not name.startswith(("seconds/", "tokens_per_s/", "time"))
            }
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]


@pytest.fixture(scope="module")
def straight(quartet: Quartet) -> Run:
    """A run that nothing happened to."""
    run = Run(quartet, "straight")
    run.finish()
    assert run.steps() == list(range(1, STEPS + 1))
    return run


@pytest.fixture
def again(quartet: Quartet, straight: Run) -> Iterator[Run]:
    """A run that begins as the other did, with the same policy, critic and samples."""
    run = Run(quartet, "again")
    (run.folder / "checkpoints").mkdir(parents=True)
    shutil.copytree(straight.folder / "checkpoints" / "step-000000", run.folder / "checkpoints" / "step-000000")
    shutil.copytree(straight.folder / "journal", run.folder / "journal")
    yield run
    run.end()
    run.log.unlink(missing_ok=True)
    shutil.rmtree(run.folder)


def assert_same(run: Run, straight: Run) -> None:
    """The same weights and measurements, bit for bit."""
    assert run.measured() == straight.measured()
    found, wanted = (load_file(one.folder / "policy" / "model.safetensors") for one in (run, straight))
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


async def versions(quartet: Quartet) -> list[int]:
    reports = await quartet.services.rollout.update_weights(10, discover=pb.Discover())
    return [report.policy_version for report in reports]


def test_a_checkpoint_holds_the_policy_as_it_was_exported(straight: Run) -> None:
    folder = straight.folder / "checkpoints" / f"step-{STEPS:06d}" / "policy" / "model"
    found, wanted = (load_file(path / "model.safetensors") for path in (folder, straight.folder / "policy"))
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        p.name for p in (straight.folder / "policy").iterdir()
    )


async def test_a_run_killed_at_steps_3_and_7_ends_as_one_that_was_not(
    quartet: Quartet, straight: Run, again: Run
) -> None:
    again.killed(again.reached(3), "--resume")
    again.killed(again.reached(7), "--resume")
    began = time.monotonic()
    again.finish("--resume")
    print(f"resumed from step 6 and finished in {time.monotonic() - began:.1f} s")
    assert_same(again, straight)
    last = int(straight.measured()[-1]["policy/version"])
    assert await versions(quartet) == [last, last]
    assert straight.measured()[-1]["samples/used_total"] == STEPS * 16


def test_a_run_killed_while_a_checkpoint_is_written_ends_as_one_that_was_not(straight: Run, again: Run) -> None:
    checkpoints = again.folder / "checkpoints"
    again.killed(lambda: any(checkpoints.glob(".step-000004.*.writing/policy/*")), "--resume")
    # Whole, or not there.
    found = latest(checkpoints)
    assert found is not None
    assert found.state.step in (2, 4)
    again.finish("--resume")
    assert_same(again, straight)


def test_a_run_killed_before_its_first_checkpoint_begins_anew(quartet: Quartet) -> None:
    run = Run(quartet, "early")
    run.killed((run.folder / "metrics.jsonl").exists)
    assert latest(run.folder / "checkpoints") is None
    run.finish("--resume")
    assert run.steps() == list(range(1, STEPS + 1))


async def test_a_run_goes_on_when_it_loses_its_learners(quartet: Quartet, straight: Run, again: Run) -> None:
    """A rank of the policy, then the critic's replica: the run restores both from the last checkpoint by itself."""
    process = again.start("--resume")
    losses = [(3, "ray::Rank"), (5, "ray::ServeReplica:critic")]
    for step, name in losses:
        again.wait(again.reached(step), process)
        named(quartet, name).kill()
        killed = time.monotonic()
        again.wait(lambda step=step: step not in again.steps(), process)  # it went back
        again.wait(again.reached(step), process)
        print(f"{name} killed: back at step {step} after {time.monotonic() - killed:.1f} s")
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert_same(again, straight)
    assert again.log.read_text().count("interrupted (") == 2


async def test_a_sender_that_dies_in_the_middle_of_a_push(quartet: Quartet, straight: Run, again: Run) -> None:
    """The push is held up by an engine that stands still. All samples are in the journal: nothing else needs it."""
    process = again.start("--resume")
    again.wait(again.reached(3), process)
    engine = psutil.Process(engine_of(next(iter(rollouts(quartet).values()))))
    engine.suspend()
    try:
        await asyncio.sleep(4)
        held = again.steps()
        assert held[-1] < STEPS, again.log.read_text()
        await asyncio.sleep(0.5)
        assert again.steps() == held, again.log.read_text()
        named(quartet, "ray::Rank").kill()
    finally:
        engine.resume()
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert again.log.read_text().count("interrupted (") == 1
    assert_same(again, straight)
    last = int(straight.measured()[-1]["policy/version"])
    assert await versions(quartet) == [last, last]


async def test_a_frozen_learner_is_given_up(quartet: Quartet, straight: Run, again: Run) -> None:
    """SIGSTOP: it answers nothing and does not die either."""
    raw = yaml.safe_load(again.config.read_text())
    raw["orchestrator"]["timeouts"] = {"train_s": 5}
    again.config.write_text(yaml.safe_dump(raw))
    process = again.start("--resume")
    again.wait(again.reached(3), process)
    frozen = named(quartet, "ray::Rank")
    frozen.suspend()
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert not psutil.pid_exists(frozen.pid) or frozen.status() == psutil.STATUS_ZOMBIE
    assert_same(again, straight)


def test_what_cannot_be_resumed_is_said(quartet: Quartet, straight: Run, again: Run) -> None:
    done = command(quartet.folder, "train", str(straight.config))
    assert "already holds checkpoints; choose another name, --resume them, or --overwrite" in done.stderr.replace(
        "\n", " "
    )
    raw = yaml.safe_load(again.config.read_text())
    raw["orchestrator"]["policy"] |= {"zero_stage": 1}
    again.config.write_text(yaml.safe_dump(raw))
    done = command(quartet.folder, "train", str(again.config), "--resume")
    assert done.returncode == 1
    message = "orchestrator.policy: a checkpoint of another layout: zero_stage: 0 in the checkpoint, 1 here"
    assert message in done.stderr.replace("\n", " ")
