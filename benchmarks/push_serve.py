"""A push through Serve and vLLM, and how much of its time bytes move. (benchmarks.push has a push layer by layer,
which replicas do not take: each would be a push of other weights than their model's.)

    python -m benchmarks.push_serve [deploy/ppo.yaml] [--replicas 1] [--rounds 5]

The rollout application of the YAML file is deployed with a model of 300 tensors (86 MB) on a Ray head of its own.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.bare_broadcast import STALL_S
from benchmarks.rollout import only_rollout, open_head
from orchestrator.config.weights import WeightsConfig
from orchestrator.deployment import cluster, serving
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import fixed
from orchestrator.push.pusher import WeightPusher
from quartet.config.base import MIB
from quartet.security.credentials import connect
from services.rollout.client import RolloutClient
from tests.models import make_policy
from tests.plain import language_model
from tests.pushing import hold
from tests.sources import HOST, LocalSource

LAYERS = {"num_hidden_layers": 33, "hidden_size": 256, "intermediate_size": 512}
"""33 layers of 9 tensors, and 3 more."""
console = Console()


def main(
    config: Annotated[Path, typer.Argument()] = Path("deploy/ppo.yaml"),
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    raw = Deployment.load(config).raw
    application = next(a for a in raw["applications"] if a["import_path"].startswith("services.rollout"))
    with tempfile.TemporaryDirectory() as folder:
        state, served = Path(folder, "ray.json"), Path(folder, "rollout.yaml")
        model = make_policy(Path(folder, "model"), kind="llama", tied=False, **LAYERS)
        application["args"] |= {"model": str(model)}
        application["deployments"][0] |= fixed(replicas)
        port = only_rollout(raw, application, served)
        ray = open_head(state)
        try:
            serving.deploy(ray, served)
            serving.await_running(ray, (application["name"],), console.print, 300)
            asyncio.run(_race(f"{HOST}:{port}", model, rounds))
        finally:
            cluster.stop(ray, state)


async def _race(target: str, model: Path, rounds: int) -> None:
    weights = {name: parameter.detach() for name, parameter in language_model(model).named_parameters()}
    client = RolloutClient(connect(target))
    source = LocalSource(weights, bucket_bytes=64 * MIB, stall_s=STALL_S)
    config = WeightsConfig(timeout_s=600, stall_s=STALL_S, control_s=30)
    await hold(client)
    pusher = WeightPusher(client, source, "gloo", config)
    pushed: list[float] = []
    transferred: list[float] = []
    for round_ in range(-1, rounds):
        report = await pusher.push(round_ + 2)
        assert report.attempts == 1
        console.print(f"push {report.seconds:.3f} s")
        if round_ >= 0:
            pushed.append(report.seconds)
            transferred.append(source.transfer_s)
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    console.print(f"{len(weights)} tensors, {size:.0f} MB, {len(report.replicas)} replicas; medians of {rounds}")
    console.print(f"push {median(pushed):.3f} s, of which bytes move {median(transferred):.3f} s")
    await client.close()


if __name__ == "__main__":
    typer.run(main)
