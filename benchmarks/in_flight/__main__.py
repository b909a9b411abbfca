"""The treatments of requests in flight during a push, against each other and against no pushes, taking turns.

    python -m benchmarks.in_flight [--rounds 3] [--pushes 6] [--requests 32] [--tokens 100] [--change 0.05]

One real vLLM engine, without Ray or Serve, is kept at `--requests` responses of `--tokens` tokens each: whenever one
has come the next is asked for. Meanwhile it gets `--pushes` pushes of weights, each as many responses after the one
before, and each parameter moved by `--change` of the spread of its tensor. Every round has a turn of each treatment,
and one without a push.

Prints for each treatment:

- tokens/s over the turn, and as a part of that without pushes;
- the time from the beginning of a pause to the commit, in which the engine starts nothing new;
- the share of tokens that follow a token of other weights in their response;
- how far the engine's log-prob of such a token is from that of the weights by which it is stamped, which
  transformers computes from the whole response: the mean of |log-ratio| of these tokens, and of all others. Beyond
  the rounding of the others, no policy has sampled it: new weights have, from the keys and values of old ones;
- the same distance between one version and the next, to compare with.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.in_flight.replica import Replica
from benchmarks.in_flight.weights import Distances, Weights
from orchestrator.push.pusher import WeightPusher
from quartet.wire.codec import Ints
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.models import MAX_LENGTH, make_policy
from tests.pushing import ModelSource, make_pusher

LONGEST_PROMPT = 20
MODES = ("keep", "keep-cache", "wait", "abort")
NONE = "no push"
CHECKED = 96
"""Responses of each treatment whose log-probs are compared."""
SHAPE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
console = Console(width=140)


@dataclass
class Turn:
    """Responses and pauses of one turn."""

    samples: list[tuple[Ints, Sample]] = field(default_factory=list)
    """Each prompt, and what was sampled for it."""
    seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(len(sample.response_ids) for _, sample in self.samples) / self.seconds


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    pushes: Annotated[int, typer.Option(min=1)] = 6,
    requests: Annotated[int, typer.Option(min=1)] = 32,
    tokens: Annotated[int, typer.Option(min=2, max=MAX_LENGTH - LONGEST_PROMPT)] = 100,
    change: Annotated[float, typer.Option(min=0)] = 0.05,
) -> None:
    """Runs the benchmark and prints its results."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_policy(Path(temporary, "policy"), kind="llama", tied=False, **SHAPE)
        weights = Weights(folder, change)
        turns = asyncio.run(_measured(folder, weights, Load(requests, tokens, pushes), rounds))
        console.print(_table(turns, weights))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and pushes of a turn."""

    requests: int
    tokens: int
    pushes: int

    @property
    def gap(self) -> int:
        """Responses between two pushes."""
        return 2 * self.requests


async def _measured(folder: Path, weights: Weights, load: Load, rounds: int) -> dict[str, list[Turn]]:
    replica = Replica()
    await replica.start({"model": str(folder), "dtype": "float32", "max_length": MAX_LENGTH, "kv_cache_mib": 64})
    source = ModelSource(weights.model)
    turns: dict[str, list[Turn]] = {mode: [] for mode in (NONE, *MODES)}
    pushers = {mode: make_pusher(replica, source, in_flight=mode) for mode in MODES}
    version = 0
    try:
        for round_ in range(-1, rounds):
            for mode, taken in turns.items():
                versions = [version + place + 1 for place in range(load.pushes if mode != NONE else 0)]
                turn = await _turn(replica, weights, pushers.get(mode), versions, load)
                version += len(versions)
                if round_ >= 0:  # the first warms up
                    taken.append(turn)
            console.print(f"round {round_ + 1} of {rounds} done")
    finally:
        await replica.shutdown()
    return turns


async def _turn(
    replica: Replica, weights: Weights, pusher: WeightPusher | None, versions: Sequence[int], load: Load
) -> Turn:
    """Keeps the engine busy, and pushes these versions meanwhile."""
    turn, came, draw = Turn(), asyncio.Condition(), np.random.default_rng(0)
    prompts, _ = plain.random_pairs(64, longest=LONGEST_PROMPT)
    replica.pauses = turn.pauses

    async def ask() -> None:
        while True:
            prompt, length = (
                prompts[draw.integers(len(prompts))],
                int(draw.integers(load.tokens // 2, load.tokens + 1)),
            )
            sampling = Sampling(max_new_tokens=length, ignore_eos=True)
            sample = await replica.sample(prompt, sampling, int(draw.integers(2**31)))
            turn.samples.append((prompt, sample))
            async with came:
                came.notify_all()

    async def reached(count: int) -> None:
        async with came:
            await came.wait_for(lambda: len(turn.samples) >= count)

    began = time.perf_counter()
    asking = [asyncio.create_task(ask()) for _ in range(load.requests)]
    try:
        for place, version in enumerate(versions, 1):
            await reached(place * load.gap)
            weights.set(version)
            assert pusher is not None
            await pusher.push(version)
        await reached((load.pushes + 1) * load.gap)
        turn.seconds = time.perf_counter() - began
    finally:
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    return turn


def _table(turns: Mapping[str, Sequence[Turn]], weights: Weights) -> Table:
    table = Table(
        "in flight", "tokens/s", "of those without a push", "pause, ms", "tokens after other weights",
        "their |log-ratio|", "of the others", "from version to version",
    )  # fmt: skip
    for mode, taken in turns.items():
        samples = [sample for turn in taken for sample in turn.samples]
        distances = Distances()
        # Those of several versions first.
        for prompt, sample in sorted(samples, key=lambda each: -len(each[1].spans))[:CHECKED]:
            distances.add(weights, prompt, sample)
        ratios = [turn.speed / none.speed for turn, none in zip(taken, turns[NONE], strict=True)]
        pauses = [pause for turn in taken for pause in turn.pauses]
        late = sum(end - start for _, sample in samples for _, start, end in sample.spans[1:])
        table.add_row(
            mode,
            f"{median(turn.speed for turn in taken):,.0f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{median(pauses) * 1e3:.0f}" if pauses else "",
            f"{late / sum(len(sample.response_ids) for _, sample in samples):.0%}",
            *(f"{np.mean(each):.1e}" if each else "" for each in (distances.after, distances.others)),
            f"{np.mean(distances.versions):.1e}" if distances.versions else "",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
