"""A run at whose processes strangers knock, and one of whose replicas stands still: neither ends it."""

import asyncio
import socket
from contextlib import ExitStack, suppress

import psutil
import pytest

from orchestrator.deployment.listeners import Listener, listeners
from tests.cluster import Quartet, rollouts, whole
from tests.runs import Run

STEPS, EACH = 3, 20
"""Steps of the run, and connections to each port of its processes."""


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
    run, frozen = Run(quartet, "knocked-at"), psutil.Process(min(rollouts(quartet).values()))
    with run.changing() as raw:
        raw["orchestrator"]["steps"] = STEPS
    frozen.suspend()
    try:
        running = asyncio.create_task(asyncio.to_thread(run.finish))
        known: set[Listener] = set()
        with ExitStack() as connections:
            while not running.done():
                await asyncio.to_thread(knock, quartet, known, connections)
                await asyncio.wait([running], timeout=1)
        await running
        print(f"{EACH} connections to each of {len(known)} ports")
        assert len(known) > 30
    finally:
        if frozen.is_running():
            frozen.kill()
    await whole(quartet, quartet.rollout_replicas)
    assert run.steps() == list(range(1, STEPS + 1))
