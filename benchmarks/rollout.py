"""Tokens/s through the rollout service against `LLM.generate` in process, on the same prompts in one run.

    python -m benchmarks.rollout [deploy/ppo.yaml] [--rounds 7] [--prompts 128] [--replicas 1]

The rollout application of the YAML file is deployed on a Ray head of its own and driven as the orchestrator drives
it: gRPC through Serve's proxy, samples streamed back with their log-probs. The other side is vLLM's own offline
class in a process that calls nothing else, with the same engine arguments, environment and seeds. The two take turns,
so that a machine that changes speed changes both; the last line is the ratio of the medians.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.ended import heed_sigterm
from benchmarks.served import served
from benchmarks.turns import ratio, report
from orchestrator.commands.offline import rollout_config
from orchestrator.data.prompts import load_prompts
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.listeners import free_ports
from orchestrator.deployment.redeployment import fixed
from quartet.models.loading import load_tokenizer
from quartet.security.credentials import connect
from quartet.security.port import Port
from quartet.wire.callers import Purpose, declared
from quartet.wire.codec import Ints
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.sample import Sampling

SERVICE, IN_PROCESS = "service", "LLM.generate"


def main(
    config: Annotated[Path, typer.Argument()] = Path("deploy/ppo.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    prompts: Annotated[int, typer.Option(min=1)] = 128,
    replicas: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Runs the benchmark and prints its results."""
    heed_sigterm()
    measured = speeds(config, rounds, prompts, replicas)
    report("tokens/s, same prompts, same seeds", measured, "{:,.0f}")
    ratio(f"{SERVICE} / {IN_PROCESS}", measured[SERVICE], measured[IN_PROCESS])


def speeds(config: Path, rounds: int, prompts: int, replicas: int = 1) -> dict[str, list[float]]:
    """Tokens/s of the service and of `LLM.generate` in each round."""
    deployment = Deployment.load(config, check_services=True)
    batch = _prompts(deployment, prompts)
    sampling = Sampling(max_new_tokens=deployment.orchestrator.sampling.max_new_tokens)
    application = next(a for a in deployment.raw["applications"] if a["import_path"].startswith("services.rollout"))
    os.environ.update((application.get("runtime_env") or {}).get("env_vars") or {})
    application["deployments"][0] |= fixed(replicas)
    engine = rollout_config(deployment, deployment.orchestrator.policy.model)
    http, grpc = free_ports(2)
    open_ = Port(local="open").environment
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), application, deployment.raw["grpc_options"], (http, grpc), open_),
        _in_process(engine, batch, sampling) as in_process,
    ):
        service = _service(f"127.0.0.1:{grpc}", deployment, batch, sampling)
        return _take_turns({SERVICE: service, IN_PROCESS: in_process}, rounds)


def _prompts(deployment: Deployment, count: int) -> list[Ints]:
    config = deployment.orchestrator
    loaded = load_prompts(config.data, load_tokenizer(config.policy.model), config.data.prompt_split).prompts
    return [loaded[index % len(loaded)].prompt_ids for index in range(count)]


@contextmanager
def _in_process(config: RolloutConfig, prompts: Sequence[Ints], sampling: Sampling) -> Iterator[Callable[[], int]]:
    """`LLM.generate` in a process by itself; called, the number of tokens that it sampled."""
    with by_itself() as process:
        process.submit(_open, config, prompts, sampling).result()
        yield lambda: process.submit(_generate).result()


def by_itself() -> ProcessPoolExecutor:
    """A process that starts with the environment of now: OpenMP and glibc read theirs as they are loaded."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


_GIVEN: list[Any] = []
"""In that process: `LLM`, the prompts and what is asked for each."""


def _open(config: RolloutConfig, prompts: Sequence[Ints], sampling: Sampling) -> None:
    """Makes the engine in this process."""
    if not torch.cuda.is_available():  # on a GPU its engine gains by a process of its own, as a replica's does
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    from services.rollout.vllm.arguments import engine_args

    given = dict(vars(engine_args(config)))
    # What only a service's engine has.
    for name in ("enable_log_requests", "weight_transfer_config", "worker_extension_cls", "scheduler_cls"):
        given.pop(name)
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
    _GIVEN[:] = [LLM(**given), [{"prompt_token_ids": prompt.tolist()} for prompt in prompts], params]


def _generate() -> int:
    """The number of tokens of a response to each prompt."""
    llm, inputs, params = _GIVEN
    return sum(len(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False))


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


if __name__ == "__main__":
    typer.run(main)
