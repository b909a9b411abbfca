"""Pushes of a policy's adapters alone beside pushes of all weights with the adapters merged in, and the sampling that
follows each, in one run.

    python -m benchmarks.adapters [--size 0.5B] [--rank 16] [--rounds 5] [--prompts 8] [--new 32] [--dtype float32]

Two engines as rollout replicas start them, one for each way, are pushed to from one model and sample from it in
turns. `push`: from the learner's adapters until the engine can sample with them, through shared memory. `sampling`:
all responses. `mismatch`: the mean of |log-prob of the engine - log-prob of the model with its adapters|.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import check_known
from benchmarks.figures import keep
from benchmarks.gpu.engine import mismatch
from benchmarks.gpu.models import SIZES, make, tokens
from quartet.config.learner import LoraConfig
from quartet.learner.lora import Weight, adapters_of, add_adapters, scaled, weights_of
from quartet.models.loading import load_causal
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.sender import Sender, make_sender
from services.rollout.config import RolloutConfig
from services.rollout.sample import Sampling

PROMPT = 16
CPU = torch.device("cpu")
console = Console()


def main(
    size: Annotated[str, typer.Option(help=", ".join(SIZES))] = "0.5B",
    rank: Annotated[int, typer.Option(min=1, help="of the adapters")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    prompts: Annotated[int, typer.Option(min=1)] = 8,
    new: Annotated[int, typer.Option(min=1, help="tokens of a response")] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Runs the benchmark and prints its results."""
    check_known([size], SIZES, "--size")
    check_known([dtype], ("float32", "bfloat16"), "--dtype")
    with tempfile.TemporaryDirectory() as temporary:
        folder = make(Path(temporary), size, dtype)
        sides = asyncio.run(_measured(folder, size, LoraConfig(rank=rank), rounds, prompts, new, dtype))
    table = Table(title=f"{size}, {dtype}, rank {rank}, {prompts} x ({PROMPT} + {new}) tokens", title_justify="left")
    for column in ("pushed", "MiB", "push s", "sampling s", "mismatch"):
        table.add_column(column, justify="right")
    for side in sides:
        table.add_row(side.name, *(f"{number:.3g}" for number in side.figures.values()))
        keep(f"{size} {dtype} {side.name}", side.figures)
    merged, alone = sides
    ratios = {name: alone.figures[name] / merged.figures[name] for name in merged.figures}
    table.add_row("alone / merged", *(f"{ratio:.3g}" for ratio in ratios.values()))
    keep(f"{size} {dtype} alone / merged", ratios)
    console.print(table)


@dataclass
class Side:
    """One way to push, and an engine that is pushed to."""

    name: str
    engine: Any
    lora: LoraConfig | None
    """The adapters, if it brings these alone."""
    model: Any
    push_s: list[float] = field(default_factory=list)
    sampling_s: list[float] = field(default_factory=list)
    mismatch: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        shapes = {weight.name: weight.parameter for weight in self._weights()}
        self.manifest = Manifest.of(shapes, 256 << 20)
        self.sender: Sender = make_sender("ipc", self.manifest, host="127.0.0.1", stall_s=60.0)

    async def join(self) -> None:
        """Joins the engine to the model's memory."""
        place = {"rank": 1, "world_size": 2, "membership": 1, "stall_s": 60.0}
        await self.engine.join({"backend": "ipc", "senders": [["", self.sender.rendezvous()]], **place})

    async def push(self, version: int) -> float:
        """Seconds of a push of the model's weights of now."""
        began = time.perf_counter()
        weights = ((weight.name, weight.merged()) for weight in self._weights())
        self.sender.load(weights if self.lora is None else scaled(weights, self.lora), version)
        await self.engine.pause("keep")
        await self.engine.receive(self.manifest)
        await self.engine.commit(version)
        return time.perf_counter() - began

    async def sample(self, prompts: list[Any], sampling: Sampling) -> tuple[list[Any], float]:
        """A response to each prompt, and the seconds of all."""
        began = time.perf_counter()
        asked = (self.engine.generate(row, ids, sampling, row) for row, ids in enumerate(prompts))
        return list(await asyncio.gather(*asked)), time.perf_counter() - began

    @property
    def figures(self) -> dict[str, float]:
        """Medians, and the mean of mismatches."""
        size = sum(map(self.manifest.size, range(len(self.manifest.names))))
        return {
            "mib": size / 2**20,
            "push_s": median(self.push_s),
            "sampling_s": median(self.sampling_s),
            "mismatch": mean(self.mismatch),
        }

    def _weights(self) -> Iterator[Weight]:
        return weights_of(self.model) if self.lora is None else adapters_of(self.model)


async def _measured(
    folder: Path, size: str, lora: LoraConfig, rounds: int, prompts: int, new: int, dtype: str
) -> tuple[Side, Side]:
    """Both sides, measured."""
    from services.rollout.vllm.engine import VLLMEngine

    model: Any = add_adapters(load_causal(str(folder), dtype), lora).eval().requires_grad_(False)
    given = {"model": str(folder), "dtype": dtype, "max_length": PROMPT + new, "kv_cache_mib": 64}
    merged = await VLLMEngine.start(RolloutConfig.parse(given, "engine"))
    alone = await VLLMEngine.start(RolloutConfig.parse(given | {"adapters": lora.model_dump()}, "engine"))
    sides = Side("merged", merged, None, model), Side("alone", alone, lora, model)
    draw, sampling = np.random.default_rng(0), Sampling(max_new_tokens=new, ignore_eos=True)
    asked = [draw.integers(2, tokens(size), PROMPT).astype(np.int32) for _ in range(prompts)]
    try:
        for side in sides:
            await side.join()
        for version in range(1, rounds + 2):  # the first round warms up
            for weight in adapters_of(model):
                weight.parameter.data.normal_(std=0.02)
            for side in sides if version % 2 else sides[::-1]:
                push_s = await side.push(version)
                samples, sampling_s = await side.sample(asked, sampling)
                if version > 1:
                    rows = [s.response_ids for s in samples], [s.logprobs for s in samples]
                    side.push_s.append(push_s)
                    side.sampling_s.append(sampling_s)
                    side.mismatch.append(mismatch(model, asked, *rows, CPU, tokens(size)))
    finally:
        for side in sides:
            side.sender.close()
            side.engine.shutdown()
    return sides


if __name__ == "__main__":
    typer.run(main)
