"""Callers that leave their streams early: how often Serve's proxy dies of it, and what they leave in the engine.

    python -m benchmarks.cancelled_streams [deploy/ppo.yaml] [--streams 10000]

The rollout application of the YAML file is deployed with a tiny model on a Ray head of its own. A stream is left at
once, after a message, by deadline or by closing the channel, 16 at a time.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console

from benchmarks.rollout import only_rollout, open_head
from orchestrator.deployment import cluster, serving
from orchestrator.deployment.redeployment import fixed
from quartet.config.base import read_yaml
from quartet.security.credentials import connect
from services.rollout.client import RolloutClient
from tests.leaving import leave_streams
from tests.models import make_policy

TOKENS = 100
EMPTY_S = 30.0
"""Longest wait for the engine to drop what its callers left."""
console = Console()


def main(
    config: Annotated[Path, typer.Argument()] = Path("deploy/ppo.yaml"),
    streams: Annotated[int, typer.Option(min=1)] = 10_000,
) -> None:
    """Runs the benchmark and prints its results."""
    raw = read_yaml(config)
    application = next(a for a in raw["applications"] if a["import_path"].startswith("services.rollout"))
    with tempfile.TemporaryDirectory() as folder:
        state, served = Path(folder, "ray.json"), Path(folder, "rollout.yaml")
        model = make_policy(Path(folder, "model"), kind="llama", tied=False)
        application["args"] |= {"model": str(model), "max_length": 128}
        application["deployments"][0] |= fixed(1)
        port = only_rollout(raw, application, served)
        ray = open_head(state)
        try:
            serving.deploy(ray, served)
            serving.await_running(ray, (application["name"],), console.print, 300)
            asyncio.run(_measure(ray, f"127.0.0.1:{port}", streams))
        finally:
            cluster.stop(ray, state)


async def _measure(ray: cluster.Cluster, target: str, streams: int) -> None:
    proxies = {proxy_of(ray)}
    began = time.perf_counter()
    seen: dict[str, int] = {}
    for first in range(0, streams, 500):
        prompts = [np.arange(5, 10, dtype=np.int32)] * 2
        for status, count in (await leave_streams(target, min(500, streams - first), prompts, TOKENS)).items():
            seen[status] = seen.get(status, 0) + count
        proxies.add(proxy_of(ray))
    wall = time.perf_counter() - began
    left, waited = await _left(target)
    console.print(f"{streams} streams left early in {wall:.0f} s: {seen}")
    console.print(f"proxy deaths: {len(proxies) - 1}; left in the engine after {waited:.1f} s: {left} requests")


def proxy_of(ray: cluster.Cluster) -> int:
    """Process id of Serve's proxy; 0 while it has none."""
    for process in psutil.Process(ray.pid).children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith("ray::ProxyActor"):
                return process.pid
        except psutil.NoSuchProcess:
            continue
    return 0


async def _left(target: str) -> tuple[int, float]:
    began = time.perf_counter()
    async with RolloutClient(connect(target)) as client:
        while (running := (await client.info(30)).running) and time.perf_counter() - began < EMPTY_S:
            await asyncio.sleep(0.1)
    return running, time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
