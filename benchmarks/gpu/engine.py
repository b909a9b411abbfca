"""vLLM as the rollout replicas start it: with and without graphs, by tokens a step, and its log-probs against the
learner's. Six minutes.

    python -m benchmarks.gpu.engine [--sizes 0.5B,1.5B] [--prompts 256] [--prompt 128] [--new 256] [--device cuda]
                                    [--settings NAME;NAME]

Each engine runs in a process of its own, since vLLM gives a GPU's memory back with its process. `decode_ms` is the
time of one more token for all prompts, and `busy_percent` the share of the whole time in which the GPU computed: the
rest is the host's. `mismatch` is the mean of |log-prob of the engine - log-prob of transformers' model|, both in
bfloat16. A push of new weights follows, through shared memory and on a GPU through its memory too, from when it is
asked for to when it generates again; `ipc_mismatch` is the mismatch under them. With `adapters` it brings these alone
(`benchmarks.adapters` compares both in turns). Then the engine rests: with `colocate` it releases its KV cache.
(`benchmarks.gpu.service` compares the service with LLM.generate.)
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.arguments import check_known
from benchmarks.gpu.models import make, tokens
from benchmarks.gpu.results import Results, alone
from benchmarks.gpu.watch import Watch, busy

SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "graphs, worker apart": {"worker_process": True},
    "eager": {"enforce_eager": True},
    "graphs, 2048 tokens a step": {"max_num_batched_tokens": 2048},
    "graphs, colocate": {"colocate": True},
    "graphs, adapters": {"adapters": {"rank": 16, "alpha": 16}},  # whose B is pushed as it is
}


def main(
    sizes: str = "0.5B,1.5B",
    prompts: int = 256,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    new: Annotated[int, typer.Option(help="tokens of a response")] = 256,
    device: str = "cuda",
    settings: Annotated[str, typer.Option(help="those to measure, separated by semicolons")] = ";".join(SETTINGS),
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    check_known(settings.split(";"), SETTINGS, "--settings")
    results = Results("engine", out)
    dtype = "bfloat16" if device == "cuda" else "float32"
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), size, dtype)
            for name in settings.split(";"):
                given = {"model": folder, "dtype": dtype, "max_length": prompt + new, "kv_cache_mib": 4096}
                given |= SETTINGS[name]
                if device == "cpu":
                    given |= {"kv_cache_mib": 64, "enforce_eager": True}
                task = [json.dumps(given), size, str(prompts), str(prompt), str(new), device]
                results.attempt(f"{size} {name}", partial(alone, "benchmarks.gpu.engine", ["--one", *task]))
    results.show()


async def one(given: str, size: str, prompts: str, prompt: str, new: str, device: str) -> None:
    """In a process of its own: one engine's figures."""
    from quartet.learner.lora import adapters_of, add_adapters, weights_of
    from quartet.models.loading import load_causal
    from services.rollout.config import RolloutConfig
    from services.rollout.sample import Sampling
    from services.rollout.vllm.engine import VLLMEngine

    config = RolloutConfig.parse(json.loads(given), "engine")
    began = time.perf_counter()
    engine = await VLLMEngine.start(config)
    figures: dict[str, Any] = {"start_s": time.perf_counter() - began}
    draw = np.random.default_rng(0)
    asked = [draw.integers(2, tokens(size), int(prompt)).astype(np.int32) for _ in range(int(prompts))]

    async def generated(count: int) -> tuple[list[Any], float]:
        sampling, began = Sampling(max_new_tokens=count, ignore_eos=True), time.time()
        samples = await asyncio.gather(*(engine.generate(i, ids, sampling, i) for i, ids in enumerate(asked)))
        return samples, time.time() - began

    await generated(int(new))
    with Watch() as watch:
        samples, took = await generated(int(new))
        ended = time.time()
    figures["tokens_s"] = round(len(samples) * int(new) / took)
    figures["decode_ms"] = 1000 * (took - (await generated(1))[1]) / (int(new) - 1)
    figures |= busy(watch.looks, ended - took, ended)
    where, some = torch.device(device), samples[:8]
    model = add_adapters(load_causal(config.model, config.dtype), config.adapters).to(where).eval()
    weights = [*(adapters_of if config.adapters else weights_of)(model)]

    def mismatch_of(samples: list[Any]) -> float:
        given = [s.response_ids for s in samples], [s.logprobs for s in samples]
        return mismatch(model, asked[: len(samples)], *given, where, tokens(size))

    figures["mismatch"] = mismatch_of(some)
    for backend in ("ipc", "cuda-ipc") if where.type == "cuda" else ("ipc",):
        times = await pushed(engine, {weight.name: weight.parameter for weight in weights}, backend)
        figures |= dict(zip((f"{backend}_push_s", f"{backend}_commit_s"), times, strict=True))
        figures[f"{backend}_mismatch"] = mismatch_of((await generated(int(new)))[0][:8])
    figures |= await rested(engine, where)
    engine.shutdown()
    print(json.dumps(figures), flush=True)


def mismatch(
    model: Any, prompts: list[Any], responses: list[Any], logprobs: list[Any], where: torch.device, vocabulary: int
) -> float:
    """Mean difference between the engine's log-probs of response tokens and those of transformers' model, over the
    first `vocabulary` rows of its head."""
    from quartet.models.distribution import Distribution
    from quartet.models.sequences import pad_pairs

    pairs = pad_pairs(prompts, responses, where)
    with torch.no_grad():
        rows = pairs.unpad(Distribution(vocabulary=vocabulary).asked_of(model, pairs)[0])
    return float(np.abs(np.concatenate(rows) - np.concatenate(logprobs)).mean())


async def rested(engine: Any, where: torch.device) -> dict[str, float]:
    """Seconds in which the engine pauses and releases its KV cache, and brings it back; GiB that were free between.
    An engine without `colocate` only pauses."""
    before, began = _free(where), time.perf_counter()
    await engine.rest()
    rest_s, freed, waking = time.perf_counter() - began, _free(where) - before, time.perf_counter()
    await engine.abort()
    return {"rest_s": rest_s, "wake_s": time.perf_counter() - waking, "freed_gib": freed}


def _free(where: torch.device) -> float:
    return torch.cuda.mem_get_info(where)[0] / 2**30 if where.type == "cuda" else 0.0


def change(weights: Iterable[torch.Tensor]) -> None:
    """Makes other weights of those in the model's folder, with which the engine starts."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in weights:
            parameter.add_(torch.randn_like(parameter), alpha=0.005)


async def pushed(
    engine: Any, weights: Mapping[str, torch.Tensor], backend: str = "ipc", rounds: int = 1
) -> tuple[float, float]:
    """Median seconds of a push of new weights, the learner's gathering included, and of its commit, after one that
    warms up."""
    from quartet.weight_transfer.manifest import Manifest
    from quartet.weight_transfer.sender import make_sender

    manifest = Manifest.of(weights, 256 << 20)
    sender = make_sender(backend, manifest, host="127.0.0.1", stall_s=60.0)
    place = {"rank": 1, "world_size": 2, "membership": 1, "stall_s": 60.0}
    await engine.join({"backend": backend, "senders": [["", sender.rendezvous()]], **place})
    pushes, commits = [], []
    for version in range(1, rounds + 2):
        change(weights.values())
        began = time.perf_counter()
        sender.load(weights.items(), version)
        await engine.pause("keep")
        await engine.receive(manifest)
        committing = time.perf_counter()
        await engine.commit(version)
        pushes.append(time.perf_counter() - began)
        commits.append(time.perf_counter() - committing)
    sender.close()
    return median(pushes[1:]), median(commits[1:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        asyncio.run(one(*sys.argv[2:]))
    else:
        typer.run(main)
