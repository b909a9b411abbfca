"""Tokens/s through the rollout service against `LLM.generate` in process, on the same prompts in one run.

    python -m benchmarks.rollout [deploy/ppo.yaml] [--rounds 7] [--prompts 128] [--replicas 1]

The rollout application of the YAML file is deployed on a Ray head of its own and driven as the orchestrator drives
it: gRPC through Serve's proxy, samples streamed back with their log-probs. The other side is vLLM's own offline
class in this process with the same engine arguments and the same seeds. The two take turns, so that a machine
that changes speed changes both; the last line is the ratio of the medians.
"""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table

from orchestrator.commands.offline import rollout_config
from orchestrator.data.prompts import load_prompts
from orchestrator.deployment import cluster, serving
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import fixed
from quartet.models.loading import load_tokenizer
from quartet.security.credentials import connect
from quartet.security.port import Port
from quartet.wire.callers import Purpose, declared
from quartet.wire.codec import Ints
from services.rollout.client import RolloutClient
from services.rollout.sample import Sampling

SERVICE, IN_PROCESS = "service", "LLM.generate"
console = Console()


def main(
    config: Annotated[Path, typer.Argument()] = Path("deploy/ppo.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    prompts: Annotated[int, typer.Option(min=1)] = 128,
    replicas: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Runs the benchmark and prints its results."""
    _report(speeds(config, rounds, prompts, replicas))


def speeds(config: Path, rounds: int, prompts: int, replicas: int = 1) -> dict[str, list[float]]:
    """Tokens/s of the service and of `LLM.generate` in each round."""
    deployment = Deployment.load(config, check_services=True)
    batch = _prompts(deployment, prompts)
    sampling = Sampling(max_new_tokens=deployment.orchestrator.sampling.max_new_tokens)
    application = next(a for a in deployment.raw["applications"] if a["import_path"].startswith("services.rollout"))
    os.environ.update((application.get("runtime_env") or {}).get("env_vars") or {})
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "ray.json")
        served = Path(folder, "rollout.yaml")
        application["deployments"][0] |= fixed(replicas)
        port = only_rollout(deployment.raw, application, served)
        ray = open_head(state)
        try:
            serving.deploy(ray, served)
            serving.await_running(ray, (application["name"],), console.print, 300)
            in_process = _in_process(deployment, batch, sampling)
            service = _service(f"127.0.0.1:{port}", deployment, batch, sampling)
            return _take_turns({SERVICE: service, IN_PROCESS: in_process}, rounds)
        finally:
            cluster.stop(ray, state)


def _prompts(deployment: Deployment, count: int) -> list[Ints]:
    config = deployment.orchestrator
    loaded = load_prompts(config.data, load_tokenizer(config.policy.model), config.data.prompt_split).prompts
    return [loaded[index % len(loaded)].prompt_ids for index in range(count)]


def only_rollout(raw: dict[str, Any], application: dict[str, Any], path: Path) -> int:
    """Writes a YAML file with this application alone on free ports; the gRPC port."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
    served = {
        "http_options": {"host": "127.0.0.1", "port": ports[0]},
        "grpc_options": raw["grpc_options"] | {"port": ports[1]},
        "applications": [application],
    }
    path.write_text(yaml.safe_dump(served))
    return ports[1]


def open_head(state: Path) -> cluster.Cluster:
    """A Ray head whose gRPC port takes every caller of this machine."""
    os.environ.update(Port(local="open").environment)
    return cluster.start(console.print, state)


def _in_process(deployment: Deployment, prompts: Sequence[Ints], sampling: Sampling) -> Callable[[], int]:
    if not torch.cuda.is_available():  # on a GPU its engine gains by a process of its own, as a replica's does
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    from services.rollout.vllm.arguments import engine_args

    application_model = deployment.orchestrator.policy.model
    given = dict(vars(engine_args(rollout_config(deployment, application_model))))
    # What only a service's engine has.
    for name in ("enable_log_requests", "weight_transfer_config", "worker_extension_cls", "scheduler_cls"):
        given.pop(name)
    llm = LLM(**given)
    inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed,
            logprobs=0,
            detokenize=False,
        )
        for seed in range(len(prompts))
    ]

    def generate() -> int:
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def _service(target: str, deployment: Deployment, prompts: Sequence[Ints], sampling: Sampling) -> Callable[[], int]:
    loop = asyncio.new_event_loop()
    size = min(deployment.orchestrator.prompts_per_call, len(prompts))

    async def open_client() -> RolloutClient:
        return RolloutClient(connect(target), metadata=declared("benchmark", Purpose.TRAINING))

    client = loop.run_until_complete(open_client())

    async def one_call(first: int) -> int:
        asked = prompts[first : first + size]
        seeds = range(first, first + len(asked))
        stream = client.generate(asked, sampling, seeds=seeds, timeout_s=300)
        return sum([len(sample.response_ids) async for samples in stream for sample in samples])

    async def all_calls() -> int:
        return sum(await asyncio.gather(*(one_call(first) for first in range(0, len(prompts), size))))

    return lambda: loop.run_until_complete(all_calls())


def _take_turns(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens/s of each side and round, after two rounds that warm up and do not count."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-2, rounds):
        for name, generate in sides.items():
            began = time.perf_counter()
            tokens = generate()
            if round_ >= 0:
                speeds[name].append(tokens / (time.perf_counter() - began))
    return speeds


def _report(measured: dict[str, list[float]]) -> None:
    drawn = Table(title="tokens/s, same prompts, same seeds", title_justify="left")
    for column in ("side", "min", "median", "max"):
        drawn.add_column(column, justify="left" if column == "side" else "right")
    for name, values in measured.items():
        drawn.add_row(name, *(f"{value:,.0f}" for value in (min(values), median(values), max(values))))
    console.print(drawn)
    pairs = [a / b for a, b in zip(measured[SERVICE], measured[IN_PROCESS], strict=True)]
    ratio = median(measured[SERVICE]) / median(measured[IN_PROCESS])
    console.print(f"service / LLM.generate: {ratio:.2f} (pair by pair {np.min(pairs):.2f} to {np.max(pairs):.2f})")


if __name__ == "__main__":
    typer.run(main)
