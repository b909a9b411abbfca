"""The largest requests that the port takes: how long one keeps an event loop, and its memory.

    python -m benchmarks.proxy_loop [--rounds 20]

A Ray head with replicas that answer at once without a look at the request, and Serve's own proxy in front of them.
Each request is as large as its method may send by default: packed numbers, as clients send them, or as many small
fields as fit, as a malicious caller would send, or as many of these as are let through. While it is on its way,
another caller asks the proxy for its health, again and again. The work of a loop is that of one thread, so that a
busy machine says the same as a quiet one; requests whose memory is measured wait in the replica together.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import psutil
import typer
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from benchmarks.cancelled_streams import proxy_of
from benchmarks.proxy_loop.cases import Case, cases, limit, pairs_of, written
from benchmarks.rollout import only_rollout, open_head
from orchestrator.deployment import cluster, serving
from protos import critic_pb2
from services.common.config.base import read_yaml
from services.common.security.credentials import connect

MOST_MS, MOST_TIMES = 50, 4
AT_ONCE = 32
"""Requests whose memory is measured together."""
SERVICES = ("Rollout", "Reward", "Critic")
console = Console()


def main(rounds: Annotated[int, typer.Option(min=1)] = 20) -> None:
    """Runs the benchmark and prints its results."""
    with tempfile.TemporaryDirectory() as folder:
        state, served = Path(folder, "ray.json"), Path(folder, "served.yaml")
        port = only_rollout(read_yaml(Path("deploy/ppo.yaml")), {}, served)
        applications = [
            {
                "name": name.lower(),
                "route_prefix": f"/{name.lower()}",
                "import_path": "benchmarks.proxy_loop.idle:build",
                "args": {"name": name},
            }
            for name in SERVICES
        ]
        served.write_text(yaml.safe_dump(read_yaml(served) | {"applications": applications}))
        ray = open_head(state)
        try:
            serving.deploy(ray, served)
            serving.await_running(ray, tuple(name.lower() for name in SERVICES), console.print, 300)
            asyncio.run(_measure(ray, f"127.0.0.1:{port}", rounds))
        finally:
            cluster.stop(ray, state)


async def _measure(ray: cluster.Cluster, target: str, rounds: int) -> None:
    proxy = psutil.Process(proxy_of(ray))
    table = Table("method", "content", "MiB", "answer", "proxy's loop, ms", "replica's", "another caller waits, ms")
    worst = 0.0
    async with connect(target, {}) as channel, connect(target, {}) as other:
        for case in cases():
            cost = await _cost(channel, other, [proxy, *_replicas(ray, case.method)], case, rounds)
            numbers = (f"{cost.proxy_ms:.1f}", f"{cost.replica_ms:.1f}", f"{cost.wait_ms:.1f}")
            table.add_row(case.method, case.content, f"{len(case.request) / 2**20:.1f}", cost.answer, *numbers)
            worst = max(worst, cost.proxy_ms, cost.replica_ms)
        times = await _memory(channel, [proxy, *_replicas(ray, "Critic/Values")])
    console.print(table)
    console.print(
        f"worst: {worst:.1f} ms of a loop's own work for one request (at most {MOST_MS}); {times:.1f} times a "
        f"request in memory, proxy, replica and what they share together (at most {MOST_TIMES})"
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a request."""

    answer: str
    proxy_ms: float
    """Work of the proxy's busiest thread."""
    replica_ms: float
    wait_ms: float
    """Longest wait of another caller meanwhile; the best of all rounds."""


async def _cost(
    channel: grpc.aio.Channel, other: grpc.aio.Channel, processes: list[psutil.Process], case: Case, rounds: int
) -> Cost:
    answer = await _ask(channel, case.method, case.request)
    before = [_work(process) for process in processes]
    waits = []
    for _ in range(rounds):
        probing = asyncio.create_task(_longest_wait(other))
        await asyncio.sleep(0.02)
        await _ask(channel, case.method, case.request)
        probing.cancel()
        waits.append(await probing)
    after = [_work(process) for process in processes]
    proxy, replica = (
        1000 * max(spent - earlier.get(thread, 0.0) for thread, spent in later.items()) / rounds
        for earlier, later in zip(before, after, strict=True)
    )
    return Cost(answer, proxy, replica, 1000 * min(waits))


def _work(process: psutil.Process) -> dict[int, float]:
    """Seconds that each thread has worked."""
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


async def _longest_wait(channel: grpc.aio.Channel) -> float:
    """Longest time, until cancelled, in which the proxy did not answer."""
    stub, longest = health_pb2_grpc.HealthStub(channel), 0.0
    while True:
        began = time.perf_counter()
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            return longest
        longest = max(longest, time.perf_counter() - began - 0.01)


async def _memory(channel: grpc.aio.Channel, processes: list[psutil.Process]) -> float:
    """Memory that a waiting request takes, as a multiple of its size."""
    request = written(critic_pb2.ValuesRequest(pairs=pairs_of(limit("Critic/Values"))))
    before = sum(process.memory_full_info().pss for process in processes)
    waiting = [asyncio.create_task(_ask(channel, "Critic/Values", request)) for _ in range(AT_ONCE)]
    peak = before
    for _ in range(50):
        await asyncio.sleep(0.1)
        peak = max(peak, sum(process.memory_full_info().pss for process in processes))
    await _ask(channel, "Critic/Adopt", b"")
    await asyncio.gather(*waiting)
    return (peak - before) / (AT_ONCE * len(request))


def _replicas(ray: cluster.Cluster, method: str) -> list[psutil.Process]:
    name = f"ray::ServeReplica:{_application(method)}"
    family = psutil.Process(ray.pid).children(recursive=True)
    return [process for process in family if " ".join(process.cmdline()).startswith(name)]


def _application(method: str) -> str:
    return method.partition("/")[0].lower()


async def _ask(channel: grpc.aio.Channel, method: str, request: bytes) -> str:
    """The answer: OK, or that it is too large."""
    ask = channel.unary_unary(f"/quartet.v1.{method}")
    try:
        await ask(request, metadata=(("application", _application(method)),), timeout=120)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return "refused"
    return "OK"


if __name__ == "__main__":
    typer.run(main)
