"""Times of a run's calls beside a foreign caller with a hundred times its load, against their times alone.

    python -m benchmarks.fairness [--seconds 20] [--load 100] [--serve]

A reward replica without a model: a pass takes a time for each token. With --serve it is deployed on a Ray head of its
own, and both call it through Serve's proxy, on a connection each; else it is a plain object. The run keeps some
small calls under way, the foreign caller a hundred times as many pairs in large ones; it comes back when refused, as
clients do. The bound is twice the run's own 99th percentile and one pass.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.rollout import only_rollout, open_head
from orchestrator.deployment import cluster, serving
from protos import common_pb2, reward_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardStub
from quartet.config.base import read_yaml
from quartet.security.port import CALLBACK, CALLBACK_VARIABLE
from quartet.wire.callers import Purpose, declared
from quartet.wire.client import OPTIONS
from quartet.wire.codec import Floats
from quartet.wire.errors import ResourceExhausted, from_rpc
from quartet.wire.pairs import Pair
from services.reward.config import FunctionScorerConfig, RewardConfig
from services.reward.replica import Reward
from services.reward.scorers.scorer import Scored
from tests.models import make_policy

RUN_CALLS, RUN_PAIRS, LARGE_PAIRS = 4, 16, 512
TOKENS = 64
BATCH_TOKENS = 16_384
PASS_S = 0.1
console = Console()


class Context:
    """A servicer context of a caller."""

    def __init__(self, run: str, purpose: Purpose) -> None:
        self._metadata = declared(run, purpose)

    def set_code(self, code: Any) -> None:
        """Ignores the status."""

    def set_details(self, details: str) -> None:
        """Ignores the details."""

    def invocation_metadata(self) -> Any:
        """The caller's declared run and purpose."""
        return self._metadata


@dataclass
class Caller:
    """Calls of one kind, one after the other, and how long each took."""

    replica: Any
    run: str
    purpose: Purpose
    pairs: int
    seconds: list[float] = field(default_factory=list)
    refusals: int = 0

    async def call(self) -> None:
        """Calls until it is cancelled."""
        request = scores(self.pairs)
        while True:
            began = time.perf_counter()
            try:
                await self.replica.Score(request, Context(self.run, self.purpose))
                self.seconds.append(time.perf_counter() - began)
            except ResourceExhausted as error:
                self.refusals += 1
                await asyncio.sleep(error.retry_after_s or 0.1)

    def percentile(self, share: float) -> float:
        """In milliseconds."""
        return 1000 * float(np.percentile(self.seconds or [np.nan], share))


def main(
    seconds: Annotated[float, typer.Option(min=1)] = 20,
    load: Annotated[int, typer.Option(min=1)] = 100,
    serve: bool = False,
) -> None:
    """Measures the run alone, then beside the foreign caller; exit status 1 beyond the bound."""
    if not serve:
        with tempfile.TemporaryDirectory() as name:
            _compare(partial(bare, tokenizer(Path(name))), seconds, load)
        return
    with deployed() as target:
        _compare(lambda: Proxied(target), seconds, load)


@contextlib.contextmanager
def deployed() -> Iterator[str]:
    """The reward service of deploy/ppo.yaml with a scorer that only takes time; its target."""
    raw = read_yaml("deploy/ppo.yaml")
    application = next(a for a in raw["applications"] if a["import_path"].startswith("services.reward"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scorer = {"kind": "function", "function": "benchmarks.fairness:take_time"}
        application["args"] = {"tokenizer": str(tokenizer(folder)), "scorer": scorer | {"batch_tokens": BATCH_TOKENS}}
        port = only_rollout(raw, application, folder / "reward.yaml")
        ray = open_head(folder / "ray.json")
        try:
            serving.deploy(ray, folder / "reward.yaml")
            serving.await_running(ray, (application["name"],), console.print, 300)
            yield f"127.0.0.1:{port}"
        finally:
            cluster.stop(ray, folder / "ray.json")


def take_time(pairs: Sequence[Pair]) -> list[float]:
    """Scores nothing, in the time that a pass of as many tokens takes."""
    time.sleep(PASS_S * len(pairs) * TOKENS / BATCH_TOKENS)
    return [0.0] * len(pairs)


class Proxied:
    """A reward service behind Serve's proxy, called as a replica is."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stubs: dict[str, RewardStub] = {}

    async def Score(self, request: pb.ScoreRequest, context: Context) -> None:
        """Makes the call over the caller's own connection."""
        metadata = context.invocation_metadata()
        caller = str(metadata)
        if caller not in self._stubs:
            own = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            self._stubs[caller] = RewardStub(  # type: ignore[no-untyped-call]
                grpc.aio.insecure_channel(self._target, options=own)
            )
        try:
            await self._stubs[caller].Score(request, metadata=(("application", "reward"), *metadata), timeout=300)
        except grpc.RpcError as error:
            raise from_rpc(error, "reward.Score") from None


def _compare(make: Callable[[], Any], seconds: float, load: int) -> None:
    alone, _ = asyncio.run(measured(seconds, 0, make))
    beside, foreign = asyncio.run(measured(seconds, load, make))
    table = Table("", "calls", "p50 ms", "p99 ms", "refusals", "pairs/s")
    for name, caller in (("run alone", alone), ("run beside", beside), ("foreign", foreign)):
        rate = len(caller.seconds) * caller.pairs / seconds
        times = (f"{caller.percentile(share):.0f}" for share in (50, 99))
        table.add_row(name, str(len(caller.seconds)), *times, str(caller.refusals), f"{rate:.0f}")
    console.print(table)
    pass_ms = asyncio.run(one_pass(seconds / 4, make)).percentile(50)
    bound = 2 * alone.percentile(99) + pass_ms
    console.print(
        f"one pass {pass_ms:.0f} ms; p99 beside {beside.percentile(99):.0f} ms, at most {bound:.0f}; "
        f"refusals of the run {beside.refusals}"
    )
    if beside.percentile(99) > bound or beside.refusals:
        raise typer.Exit(1)


def tokenizer(folder: Path) -> Path:
    """Makes a tokenizer in the folder, and returns it."""
    return make_policy(folder / "model", kind="llama", tied=False)


class TakesTime:
    """A scorer of zeros, in the time that a pass of as many tokens takes."""

    identity = reward_pb2.ScorerIdentity(name="function:takes_time")
    max_length, batch_tokens = BATCH_TOKENS, BATCH_TOKENS
    texts = keeps = False
    vocab_size: int | None = None

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """Zeros, [B]."""
        tokens = sum(len(pair.prompt_ids) + len(pair.response_ids) for pair in pairs)
        time.sleep(PASS_S * tokens / BATCH_TOKENS)
        return np.zeros(len(pairs), np.float32)

    def check(self) -> None:
        """Finds nothing wrong."""


def bare(folder: Path) -> Any:
    """A reward replica without Serve, with the tokenizer in the folder."""
    scorer = FunctionScorerConfig(kind="function", function="takes:time", batch_tokens=BATCH_TOKENS)
    config = RewardConfig(tokenizer=str(folder), scorer=scorer)
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)  # a replica refuses to be unguarded; this one has no port
    return Reward.func_or_class(config, lambda *_: TakesTime())  # type: ignore[attr-defined]


async def measured(seconds: float, load: int, make: Callable[[], Any]) -> tuple[Caller, Caller]:
    """The run and a foreign caller with `load` times its pairs, on the replica that `make` gives."""
    replica = make()
    run = Caller(replica, "run", Purpose.TRAINING, RUN_PAIRS)
    foreign = Caller(replica, "judge", Purpose.FOREIGN, LARGE_PAIRS)
    large_calls = -(-load * RUN_CALLS * RUN_PAIRS // LARGE_PAIRS)
    callers = [foreign] * large_calls + [run] * RUN_CALLS
    tasks = [asyncio.create_task(caller.call()) for caller in callers]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    return run, foreign


async def one_pass(seconds: float, make: Callable[[], Any]) -> Caller:
    """Calls that fill a pass each, alone: the time of a pass, with all that is done for it."""
    caller = Caller(make(), "pass", Purpose.FOREIGN, BATCH_TOKENS // TOKENS)
    task = asyncio.create_task(caller.call())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])
    return caller


def scores(count: int) -> pb.ScoreRequest:
    """`count` pairs of TOKENS tokens."""
    half = TOKENS // 2
    sequences = common_pb2.Sequences(
        token_ids=np.full(count * half, 5, "<i4").tobytes(), lengths=np.full(count, half, "<i4").tobytes()
    )
    return pb.ScoreRequest(tokens=common_pb2.Pairs(prompts=sequences, responses=sequences))


if __name__ == "__main__":
    typer.run(main)
