"""A run at whose processes strangers knock, and one of whose replicas stands still: neither ends it."""

import asyncio
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.deployment.listeners import Listener, listeners
from orchestrator.monitoring.metrics import FILE, read_metrics
from tests.cluster import Quartet, rollouts, whole
from tests.commands import PATIENCE_S, Command

STEPS, EACH = 3, 20
"""Steps of the run, and connections to each port of its processes."""


def configured(quartet: Quartet) -> Path:
    orchestrator = quartet.raw["orchestrator"] | {"name": "knocked-at", "steps": STEPS, "evaluation": {"every": 0}}
    path = quartet.folder / "knocked-at.yaml"
    path.write_text(yaml.safe_dump(quartet.raw | {"orchestrator": orchestrator}))
    return path


def knock(quartet: Quartet, known: set[Listener], connections: ExitStack) -> None:
    """Opens connections that say nothing to each further port of the head's processes and of this one's."""
    own = psutil.Process().children(recursive=True)
    for listener in set(listeners([*quartet.cluster.processes(), *own])) - known:
        known.add(listener)
        for _ in range(EACH):
            with suppress(OSError):  # it has ended
                connections.enter_context(socket.create_connection(("127.0.0.1", listener.port), 1))


@pytest.mark.exhaustive  # where ports are bound: in test_train.py; a frozen replica in a run: tests/integration
async def test_idle_connections_and_a_frozen_replica_do_not_end_a_run(quartet: Quartet) -> None:
    frozen = psutil.Process(min(rollouts(quartet).values()))
    frozen.send_signal(signal.SIGSTOP)
    try:
        log = quartet.folder / "knocked-at.log"
        run = Command(quartet.folder, log, "train", str(configured(quartet)))
        running = asyncio.create_task(asyncio.to_thread(run.wait, PATIENCE_S))
        known: set[Listener] = set()
        with ExitStack() as connections:
            while not running.done():
                await asyncio.to_thread(knock, quartet, known, connections)
                await asyncio.wait([running], timeout=1)
        print(f"{EACH} connections to each of {len(known)} ports")
        assert len(known) > 30
        assert await running == 0, log.read_text()
    finally:
        if frozen.is_running():
            frozen.kill()
    await whole(quartet, quartet.rollout_replicas)
    lines = read_metrics(quartet.folder / "runs" / "knocked-at" / FILE)
    assert [line["step"] for line in lines if line["step"]] == list(range(1, STEPS + 1))
