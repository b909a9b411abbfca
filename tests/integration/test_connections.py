"""Strangers' connections that rest, to ports of all kinds, while a run trains."""

import asyncio
import statistics
import time
from contextlib import ExitStack

import grpc
import psutil
import pytest

from quartet.security.credentials import connect
from tests.cluster import Quartet, named
from tests.commands import PATIENCE_S
from tests.runs import Run
from tests.unit.front_door import ask, outcome
from tests.unit.resting import resting

pytestmark = pytest.mark.exhaustive
STRANGERS = 20_000
STEPS = 12


def listening(process: psutil.Process) -> list[int]:
    """Ports on which a process listens."""
    return sorted({each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN})


def ports(quartet: Quartet, kind: str) -> list[int]:
    """The ports of the gRPC proxy's process, or of a replica's, or that of the head's control store."""
    if kind == "head":
        return [int(quartet.cluster.address.rpartition(":")[2])]
    return listening(named(quartet, "ray::ProxyActor" if kind == "proxy" else "ray::ServeReplica:reference"))


@pytest.mark.parametrize("kind", ["proxy", "replica", "head"])
async def test_twenty_thousand_connections_to_a_port_end_no_run_and_keep_no_new_connection_out(
    quartet: Quartet, kind: str
) -> None:
    run = Run(quartet, f"crowded-{kind}")
    with run.changing() as raw:
        raw["orchestrator"]["steps"] = STEPS

    async def connected_s() -> float:
        """Seconds until a new connection is answered."""
        began = time.monotonic()
        async with connect(quartet.target) as channel:
            assert (await outcome(ask(channel, "Reference/Info")))[0] is grpc.StatusCode.OK
        return time.monotonic() - began

    taken = list[float]()
    try:
        process = run.start()
        await asyncio.to_thread(run.wait, run.reached(2), process)
        alone = statistics.median([await connected_s() for _ in range(5)])
        for port in ports(quartet, kind):
            with ExitStack() as stack:
                await asyncio.to_thread(stack.enter_context, resting(f"127.0.0.1:{port}", STRANGERS, "http2"))
                taken += [await connected_s() for _ in range(5)]
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0, run.log.read_text()
    finally:
        run.end()
    assert run.steps() == list(range(1, STEPS + 1))
    print(f"\n{kind}: new connections answered after", " ".join(f"{seconds:.3f}" for seconds in sorted(taken)), "s")
    assert statistics.median(taken) < 1 + 10 * alone
