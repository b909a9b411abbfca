"""Cost of TLS and authentication: the rollout service with a policy and client certificates against plain loopback.

    python -m benchmarks.security_cost [deploy/ppo.yaml] [--rounds 10]

Two Ray heads with the rollout application of the YAML file and the same tiny model, one of them with the port of
`quartet keys`. They take turns. A tiny model is the worst case: hardly any time goes into anything but the calls.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console

from benchmarks.rollout import only_rollout
from orchestrator.deployment import cluster, serving
from services.common.config.base import read_yaml
from services.common.security.credentials import VARIABLE, connect
from services.common.security.keys.folder import Keys
from services.common.security.port import Port
from services.rollout.client import RolloutClient
from services.rollout.sample import Sampling
from tests.models import make_policy

HOST = "127.0.0.1"
PROMPTS, PER_CALL, TOKENS, INFOS = 128, 32, 32, 100
console = Console()


def main(
    config: Annotated[Path, typer.Argument()] = Path("deploy/ppo.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Runs the benchmark and prints its results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = Keys(folder / "keys", days=1)
        keys.make([HOST], {"run-a": "trainer"}, tokens=False)
        model = make_policy(folder / "model", kind="llama", tied=False)
        ports = {"plain": Port(local="open"), "secured": Port(policy=keys.policy)}
        heads: dict[str, cluster.Cluster] = {}
        targets: dict[str, str] = {}
        try:
            for side, port in ports.items():
                targets[side] = _start(config, folder / side, model, port, heads, side)
            credentials = {"plain": {}, "secured": {VARIABLE: str(keys.folder / "clients" / "run-a")}}
            asyncio.run(_race(heads, targets, credentials, rounds))
        finally:
            for side, head in heads.items():
                cluster.stop(head, folder / side / "ray.json")


def _start(config: Path, folder: Path, model: Path, port: Port, heads: dict[str, cluster.Cluster], side: str) -> str:
    raw = read_yaml(config)
    application = next(a for a in raw["applications"] if a["import_path"].startswith("services.rollout"))
    application["args"] |= {"model": str(model), "max_length": 128}
    application["deployments"][0]["num_replicas"] = 1
    folder.mkdir()
    number = only_rollout(raw, application, folder / "rollout.yaml")
    os.environ.update(port.environment)
    heads[side] = cluster.start(console.print, folder / "ray.json")
    serving.deploy(heads[side], folder / "rollout.yaml")
    serving.await_running(heads[side], (application["name"],), console.print, 300)
    return f"{HOST}:{number}"


async def _race(
    heads: Mapping[str, cluster.Cluster],
    targets: Mapping[str, str],
    credentials: Mapping[str, Mapping[str, str]],
    rounds: int,
) -> None:
    sides = {
        side: Side(RolloutClient(connect(targets[side], credentials[side])), [*head.processes(), psutil.Process()])
        for side, head in heads.items()
    }
    await _measure(sides, rounds)
    for side in sides.values():
        await side.client.close()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: a client, and all processes that work for it."""

    client: RolloutClient
    processes: list[psutil.Process]

    def cpu_s(self) -> float:
        """Processor time that they have used."""
        times = [process.cpu_times() for process in self.processes if process.is_running()]
        return sum(time.user + time.system for time in times)


async def _measure(sides: Mapping[str, Side], rounds: int) -> None:
    """Prints time and processor time for each piece of work. On a busy machine only the latter says anything."""
    for name, work in {"generation": _generate, "Info, one at a time": _infos}.items():
        wall: dict[str, list[float]] = {side: [] for side in sides}
        cpu: dict[str, list[float]] = {side: [] for side in sides}
        for round_ in range(-2, rounds):
            # Each is the first in every other round.
            for side in sorted(sides, reverse=round_ % 2 == 0):
                began, used = time.perf_counter(), sides[side].cpu_s()
                await work(sides[side].client)
                if round_ >= 0:
                    wall[side].append(time.perf_counter() - began)
                    cpu[side].append(sides[side].cpu_s() - used)
        for kind, spent in (("time", wall), ("processor time", cpu)):
            ratio = median(spent["secured"]) / median(spent["plain"])
            totals = sum(spent["secured"]) / sum(spent["plain"])
            each = ", ".join(f"{side} {median(values) * 1e3:,.0f} ms" for side, values in spent.items())
            console.print(f"{name}, {kind}: {each}; secured / plain {ratio:.3f} by medians, {totals:.3f} in all")


async def _generate(client: RolloutClient) -> None:
    prompts = [np.arange(5, 15, dtype=np.int32)] * PROMPTS
    sampling = Sampling(max_new_tokens=TOKENS, ignore_eos=True)

    async def call(first: int) -> None:
        async for _ in client.generate(prompts[first : first + PER_CALL], sampling, timeout_s=300):
            pass

    await asyncio.gather(*(call(first) for first in range(0, PROMPTS, PER_CALL)))


async def _infos(client: RolloutClient) -> None:
    for _ in range(INFOS):
        await client.info(30)


if __name__ == "__main__":
    typer.run(main)
