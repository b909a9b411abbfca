"""Samples/s of the reward service, over gRPC and HTTP, against the same model called in process in ideal batches.

    python -m benchmarks.reward [--seconds 20] [--rounds 3] [--callers 64] [--hidden 256] [--layers 4] [--length 128]

A Llama with random weights scores pairs of token ids. 64 callers, each of its own name and connection, send 1 to 8
pairs at a time and wait for the answer; in this process all pairs of a round are one call of the scorer, which sorts
them by length. The three take turns, so that a machine that changes speed changes all. Then one caller is measured
alone, and beside another that floods the service.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import numpy as np
import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForSequenceClassification

from benchmarks.ended import heed_sigterm
from benchmarks.figures import keep
from benchmarks.served import served
from orchestrator.deployment.listeners import free_ports
from quartet.columns import Columns
from quartet.models.device import default_device
from quartet.models.loading import load_tokenizer
from quartet.security.credentials import connect
from quartet.security.port import Port
from quartet.wire.callers import Purpose, declared
from quartet.wire.codec import Ints
from quartet.wire.errors import ResourceExhausted
from quartet.wire.pairs import Pair
from services.reward.client import RewardClient
from services.reward.config import ModelScorerConfig
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import EncodedPair
from tests.models import BOS, EOS, PAD, WORDS, make_tokenizer

console = Console()
Row = tuple[Ints, Ints]
"""A prompt and a response."""
SEED = 0
ROWS = 128
"""Different pairs; in this process a call has all of them."""
MOST_PAIRS = 8
"""Most pairs of a call."""
FLOOD_PAIRS, FLOOD_CALLS, STEADY_CALLS = 64, 16, 8
"""Pairs of a flooding caller's call, its calls at a time, and the calls at a time of the one beside it."""
DEADLINE_S = 300.0


@dataclass
class Caller:
    """One caller: what it has had scored, and how long it waited for each answer."""

    ask: Callable[[Sequence[Row]], Awaitable[int]]
    """Scores pairs of prompt and response; the number that have a score."""
    pairs: int = 0
    seconds: list[float] = field(default_factory=list)

    async def go_on(self, draw: np.random.Generator, rows: Sequence[Row], count: int, until: float) -> None:
        """Calls until that time, with `count` pairs each, or from 1 to MOST_PAIRS if it is 0."""
        while time.perf_counter() < until:
            pairs = count or int(draw.integers(1, MOST_PAIRS + 1))
            asked = [rows[int(row)] for row in draw.integers(0, len(rows), pairs)]
            began = time.perf_counter()
            while (scored := await self._scored(asked)) is None:
                pass
            assert scored == len(asked)
            self.pairs += scored
            self.seconds.append(time.perf_counter() - began)

    async def _scored(self, asked: Sequence[Row]) -> int | None:
        """The number that have a score; None if the service was full, after the wait that it asks for."""
        try:
            return await self.ask(asked)
        except ResourceExhausted as error:
            await asyncio.sleep(error.retry_after_s or 0.1)
            return None


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="of each turn")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    callers: Annotated[int, typer.Option(min=1)] = 64,
    hidden: Annotated[int, typer.Option(min=64, help="width of the model")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="depth of the model")] = 4,
    length: Annotated[int, typer.Option(min=8, help="most tokens of a pair")] = 128,
    batch_tokens: Annotated[int, typer.Option(min=64, help="most tokens of a pass")] = 4096,
    threads: Annotated[int, typer.Option(min=1, help="threads of the model, on a CPU")] = 1,
) -> None:
    """Measures and prints the ratios."""
    heed_sigterm()
    draw = np.random.default_rng(SEED)
    lengths = draw.integers(2, 3 * length // 4, ROWS).tolist()
    rows = [(_ids(draw, length // 4, BOS), _ids(draw, each, EOS)) for each in lengths]
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder, "reward"), hidden, layers, length)
        settings = {"kind": "model", "model": str(model), "batch_tokens": batch_tokens}
        torch.set_num_threads(threads)
        config = ModelScorerConfig.parse(settings, "scorer")
        scorer = ModelScorer(config, load_tokenizer(str(model)), default_device())
        http, grpc = free_ports(2)
        options = yaml.safe_load(Path("deploy/ppo.yaml").read_text())["grpc_options"]
        open_ = Port(local="open", http=True).environment
        with served(Path(folder), _application(settings, threads), options, (http, grpc), open_):
            asyncio.run(_measure(scorer, rows, http, grpc, callers, seconds, rounds))


def _model(folder: Path, hidden: int, layers: int, length: int) -> Path:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(2, hidden // 64),
        max_position_embeddings=length,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _application(scorer: Mapping[str, Any], threads: int) -> dict[str, Any]:
    # A hundred callers with a call each hold less than half of the waiting work together.
    return {
        "name": "reward",
        "route_prefix": "/reward",
        "import_path": "services.reward.replica:build",
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        "args": {"scorer": dict(scorer), "tokenizer": scorer["model"], "limits": {"batch_s": 60}},
        "deployments": [{"name": "Reward", "num_replicas": 1, "ray_actor_options": {"num_cpus": 1}}],
    }


async def _measure(
    scorer: ModelScorer,
    rows: Sequence[Row],
    http: int,
    grpc: int,
    callers: int,
    seconds: float,
    rounds: int,
) -> None:
    speeds: dict[str, list[float]] = {"in process": [], "gRPC": [], "HTTP": []}
    waits: dict[str, list[float]] = {"gRPC": [], "HTTP": []}
    async with AsyncExitStack() as stack:
        sides = {
            "gRPC": [await _over_grpc(stack, grpc, f"caller-{n}") for n in range(callers)],
            "HTTP": [await _over_http(stack, http, f"caller-{n}") for n in range(callers)],
        }
        for round_ in range(-1, rounds):  # one that warms up
            turn = seconds if round_ >= 0 else min(seconds, 3.0)
            for name in speeds:
                if name == "in process":
                    speed, took = await asyncio.to_thread(_in_process, scorer, rows, turn), list[float]()
                else:
                    speed, took = await _together(sides[name], rows, 0, turn, round_)
                if round_ >= 0:
                    speeds[name].append(speed)
                    waits.setdefault(name, []).extend(took)
        _report(speeds, waits)
        for name, open_ in (("gRPC", _over_grpc), ("HTTP", _over_http)):
            port = grpc if name == "gRPC" else http
            steady = [await open_(stack, port, "steady") for _ in range(STEADY_CALLS)]
            flood = [await open_(stack, port, "flood") for _ in range(FLOOD_CALLS)]
            alone, before = await _together(steady, rows, MOST_PAIRS, seconds, 0)
            flooding = asyncio.create_task(_together(flood, rows, FLOOD_PAIRS, 2 + seconds, 1))
            await asyncio.sleep(1)
            beside, after = await _together(steady, rows, MOST_PAIRS, seconds, 2)
            await flooding
            share, slower = beside / alone, float(np.percentile(after, 99) / np.percentile(before, 99))
            console.print(f"{name}, beside a flood: {share:.2f} of its samples/s alone, p99 {slower:.1f} times")
            keep(f"reward {name} flooded", {"share": share, "p99": slower})


def _in_process(scorer: ModelScorer, rows: Sequence[Row], seconds: float) -> float:
    """Samples/s of calls with all rows."""
    pairs = [EncodedPair(prompt, response, Pair("", "")) for prompt, response in rows]
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        scorer.score(pairs)
        count += len(pairs)
    return count / (time.perf_counter() - began)


async def _together(
    callers: Sequence[Caller], rows: Sequence[Row], count: int, seconds: float, seed: int
) -> tuple[float, list[float]]:
    """Samples/s of all callers, and the seconds of each call. A turn ends with its last answer."""
    for caller in callers:
        caller.pairs, caller.seconds = 0, []
    began = time.perf_counter()
    draws = np.random.default_rng(seed + 1).spawn(len(callers))
    async with asyncio.TaskGroup() as group:
        for caller, draw in zip(callers, draws, strict=True):
            group.create_task(caller.go_on(draw, rows, count, began + seconds))
    took = time.perf_counter() - began
    return sum(caller.pairs for caller in callers) / took, [each for caller in callers for each in caller.seconds]


async def _over_grpc(stack: AsyncExitStack, port: int, name: str) -> Caller:
    channel = connect(f"127.0.0.1:{port}")
    stack.push_async_callback(channel.close)
    client = RewardClient(channel, metadata=declared(name, Purpose.FOREIGN))

    async def ask(pairs: Sequence[Row]) -> int:
        scores = await client.score(Columns.of_pairs(*zip(*pairs, strict=True)), timeout_s=DEADLINE_S)
        return int(np.isfinite(scores.values).sum())

    return Caller(ask)


async def _over_http(stack: AsyncExitStack, port: int, name: str) -> Caller:
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            headers={"quartet-run": name},
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
        )
    )

    async def ask(pairs: Sequence[Row]) -> int:
        body = {"pairs": [{"prompt_ids": p.tolist(), "response_ids": r.tolist()} for p, r in pairs]}
        async with session.post("/reward/v1/rewards", json=body) as answer:
            text = await answer.read()
            if answer.status == 429:
                raise ResourceExhausted("full", float(answer.headers["retry-after"]))
            assert answer.status == 200, text
        return sum(result["outcome"] == "scored" for result in json.loads(text)["results"])

    return Caller(ask)


def _report(speeds: Mapping[str, Sequence[float]], waits: Mapping[str, Sequence[float]]) -> None:
    drawn = Table("side", "min", "median", "max", "of in process", "p50 ms", "p99 ms", "p99 / p50", title="samples/s")
    for name, values in speeds.items():
        ratio = median(values) / median(speeds["in process"])
        cells = [f"{value:,.1f}" for value in (min(values), median(values), max(values))]
        took = waits.get(name)
        percentiles = np.percentile(took, [50, 99]) if took else (np.nan, np.nan)
        spread = float(percentiles[1] / percentiles[0])
        told = [f"{1000 * value:.0f}" for value in percentiles] + [f"{spread:.1f}"] if took else ["", "", ""]
        drawn.add_row(name, *cells, f"{ratio:.2f}", *told)
        keep(f"reward {name}", {"samples_s": list(values), "ratio": ratio, "spread": spread if took else None})
    console.print(drawn)


def _ids(draw: np.random.Generator, count: int, special: int) -> Ints:
    """A number of ids, with a special one at their beginning or end."""
    ids = draw.integers(4, len(WORDS), max(count, 1)).astype(np.int32)
    ids[0 if special == BOS else -1] = special
    return ids


if __name__ == "__main__":
    typer.run(main)
