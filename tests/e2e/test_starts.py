"""Starts of `quartet train` that meet processes which were just killed or stand still: they wait, and say why."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
import yaml

from orchestrator.deployment.cluster import STATE
from orchestrator.deployment.listeners import free_ports
from tests.cluster import Quartet, named, titled
from tests.commands import PATIENCE_S, finished
from tests.runs import Run

WAITS = "waiting up to "


@pytest.fixture
def short(quartet: Quartet) -> Iterator[Run]:
    """A run of two steps."""
    run = Run(quartet, "short")
    with run.changing() as raw:
        raw["orchestrator"] |= {"steps": 2}
    yield run
    run.end()
    run.log.unlink(missing_ok=True)


async def test_the_proxy_the_controller_and_the_critic_are_killed_as_a_run_starts(
    quartet: Quartet, short: Run
) -> None:
    for name in ("ray::ServeController", "ray::ProxyActor", "ray::ServeReplica:critic"):
        named(quartet, name).kill()
    short.finish("--overwrite")
    assert short.steps() == [1, 2]


@pytest.mark.exhaustive  # other processes at the same waits
@pytest.mark.parametrize("which", ["ray::ProxyActor", "ray::ServeReplica:critic", "ray::ServeReplica:reference"])
async def test_a_process_that_stands_still_as_a_run_starts(quartet: Quartet, short: Run, which: str) -> None:
    process = named(quartet, which)
    process.suspend()
    try:
        short.finish("--overwrite")
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)
    assert short.steps() == [1, 2]


async def test_losses_before_the_first_checkpoint_begin_the_run_again(quartet: Quartet, short: Run) -> None:
    """The critic dies when the run has already asked for it, and the learner starts."""
    process = short.start("--overwrite")
    short.wait(lambda: bool(titled(quartet, "ray::PolicyRank")), process)
    named(quartet, "ray::ServeReplica:critic").kill()
    assert process.wait(PATIENCE_S) == 0, short.log.read_text()
    assert short.steps() == [1, 2]


async def test_replicas_that_start_for_longer_than_a_push_waits_for_them(quartet: Quartet, short: Run) -> None:
    """The run goes back and asks the services what they are; the replicas wait for nothing that it would do later."""
    with short.changing() as raw:
        raw["orchestrator"].setdefault("weights", {})["patience_s"] = 0.5
    process = short.start("--overwrite")
    short.wait(lambda: bool(titled(quartet, "ray::PolicyRank")), process)

    def gave_up() -> bool:
        for pid in titled(quartet, "ray::ServeReplica:rollout"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "interrupted (" in short.log.read_text()

    short.wait(gave_up, process)
    assert process.wait(PATIENCE_S) == 0, short.log.read_text()
    assert short.steps() == [1, 2]


def test_where_nothing_runs_a_start_ends_at_once(quartet: Quartet, short: Run) -> None:
    """Another folder, in which no head was started, and a port at which nothing listens."""
    raw = yaml.safe_load(short.config.read_text())
    [port] = free_ports(1)
    raw["orchestrator"] |= {"target": f"127.0.0.1:{port}", "name": "nothing-runs"}
    raw["grpc_options"] = raw["grpc_options"] | {"port": port}
    folder = quartet.folder / "without-a-head"
    folder.mkdir()
    assert not (folder / STATE).exists()
    config = folder / "a.yaml"
    config.write_text(yaml.safe_dump(raw))
    code, told = finished(folder, "train", str(config))
    assert code == 1
    assert WAITS not in told
    assert f"no answer at 127.0.0.1:{port}" in told
    assert "are the services up?" in told.replace("\n", " ")
