"""Quartet's pushes beside vLLM's own ipc engine, on one GPU, in one run. Six minutes.

    python -m benchmarks.gpu.pushes [--sizes 1.5B,7B] [--rounds 5] [--device cuda]

Each side has a process of its own, which holds the learner's weights, and a vLLM engine in another one, both on the
GPU. A push goes from the learner's weights until the engine can sample with them. `ipc` and `cuda-ipc` are Quartet's,
which compute checksums on both sides and load nothing before they agree. `vllm` is vLLM's engine as it is by default,
one handle for each tensor, and `vllm, packed` with its packed buffers; neither verifies what it loads. `mismatch`
compares log-probs after the last push with those of transformers' model, whose weights changed before it: it is as
small as in benchmarks.gpu.engine if they arrived. vLLM's engine needs a GPU: with `--device cpu` its rows are errors.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.gpu.engine import change, mismatch, pushed
from benchmarks.gpu.models import make, tokens
from benchmarks.gpu.results import Results, alone

MODULE = "benchmarks.gpu.pushes"
OURS = ("ipc", "cuda-ipc")
SIDES = (*OURS, "vllm", "vllm, packed")
PROMPTS, PROMPT, NEW = 4, 32, 32


def main(
    sizes: str = "1.5B,7B",
    rounds: Annotated[int, typer.Option(help="pushes that count")] = 5,
    device: str = "cuda",
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    results = Results("pushes", out)
    dtype = "bfloat16" if device == "cuda" else "float32"
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), size, dtype)
            for side in SIDES:
                task = ["--side", side, folder, size, str(rounds), device, dtype]
                # vLLM pickles its handles, which it does only if this is set.
                results.attempt(f"{size} {side}", partial(alone, MODULE, task, VLLM_ALLOW_INSECURE_SERIALIZATION="1"))
    results.show()


def print_side(side: str, folder: str, size: str, rounds: str, device: str, dtype: str) -> None:
    """In a process of its own: the figures of one side."""
    from quartet.models.loading import load_causal
    from services.rollout.config import RolloutConfig

    where = torch.device(device)
    given = {"model": folder, "dtype": dtype, "max_length": PROMPT + NEW + 1, "max_num_seqs": 16}
    config = RolloutConfig.parse(given | {"kv_cache_mib": 1024 if device == "cuda" else 64}, "engine")
    model = load_causal(folder, dtype).to(where).eval()
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, tokens(size), PROMPT).astype(np.int32) for _ in range(PROMPTS)]
    change(model.parameters())
    if side in OURS:
        figures = asyncio.run(_ours(config, model, prompts, side, int(rounds), where, tokens(size)))
    else:
        figures = _theirs(config, model, prompts, side.endswith("packed"), int(rounds), where, tokens(size))
    gib = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
    print(json.dumps({"gib": round(gib, 2), **figures}), flush=True)


async def _ours(
    config: Any, model: Any, prompts: list[Any], backend: str, rounds: int, where: torch.device, vocabulary: int
) -> dict[str, float]:
    from services.rollout.sample import Sampling
    from services.rollout.vllm.engine import VLLMEngine

    engine = await VLLMEngine.start(config)
    push_s, commit_s = await pushed(engine, dict(model.named_parameters()), backend, rounds)
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    samples = await asyncio.gather(*(engine.generate(i, ids, sampling, i) for i, ids in enumerate(prompts)))
    engine.shutdown()
    ids, logprobs = [sample.response_ids for sample in samples], [sample.logprobs for sample in samples]
    difference = mismatch(model, prompts, ids, logprobs, where, vocabulary)
    return {"push_s": push_s, "commit_s": commit_s, "mismatch": difference}


def _theirs(
    config: Any, model: Any, prompts: list[Any], packed: bool, rounds: int, where: torch.device, vocabulary: int
) -> dict[str, float]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # a process cannot open its own handles
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    from services.rollout.vllm.arguments import engine_args

    given = dict(vars(engine_args(config)))
    for name in ("enable_log_requests", "worker_extension_cls", "scheduler_cls"):  # what only a replica's engine has
        given.pop(name)
    llm = LLM(**given | {"weight_transfer_config": WeightTransferConfig(backend="ipc")})
    trainer, times = VllmTrainer(llm, model, packed=packed), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        trainer.push()
        times.append(time.perf_counter() - began)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = [
        one.outputs[0] for one in llm.generate([{"prompt_token_ids": ids.tolist()} for ids in prompts], params)
    ]
    ids = [np.asarray(output.token_ids, np.int32) for output in outputs]
    logprobs = [
        np.asarray([entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)])
        for output in outputs
    ]
    return {"push_s": median(times[1:]), "mismatch": mismatch(model, prompts, ids, logprobs, where, vocabulary)}


class VllmTrainer:
    """vLLM's own trainer for its ipc engine. It calls the engine through the four methods of vLLM's clients, here
    those of an LLM in this process."""

    def __init__(self, llm: Any, model: Any, *, packed: bool) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        self._llm = llm
        info, source = IPCTrainerInitInfo(rank=0, packed=packed), ModuleSource(model)
        self._trainer: Any = IPCTrainerWeightTransferEngine.trainer_init(info, client=self, source=source)

    def push(self) -> None:
        """One push, after which the engine samples with the model's weights."""
        self._llm.reset_prefix_cache()
        self._trainer.send_weights()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Makes the engine ready to receive."""
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Opens the engine's layers."""
        self._llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Loads the tensors of these handles."""
        self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes the layers."""
        self._llm.collective_rpc("finish_weight_update")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        print_side(*sys.argv[2:])
    else:
        typer.run(main)
