"""Cost of one request for a replica: time of the event loop, and memory over the size of the message.

    python -m benchmarks.admission

Each service's own method is called without Serve and without a model around it, with hostile requests and with the
largest that are admitted. Beside it the same request is read as a whole before it is weighed, each row cut out and
decoded on the event loop, which is what the services did before. Every request is measured twice, once for time and
once for memory. Memory counts the message once, as it lies in memory, and all that Python allocates for it.
"""

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.bare_replicas import Context, critic, reference, reward, rollout, tokenizer
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from services.common.wire.errors import ServiceError
from services.common.wire.pairs import Pair
from services.reward.scorers.scorer import Scored

TICK_S = 0.001
ROUNDS = 5
"""The best counts: other processes of the machine can only make it worse."""
MOST_MS, MOST_TIMES = 50, 4
LARGE_MIB = 1
"""Least size in MiB: for smaller messages the rows of one pass, whose number is bounded, are most of the memory."""
console = Console()


@dataclass(frozen=True, slots=True)
class Case:
    """A request to a method of a service."""

    service: str
    name: str
    request: Any
    ask: Callable[[Any], Awaitable[None]]
    eager: Callable[[Any], Any]
    """Reads the request as a whole."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one request."""

    loop_ms: float
    """Longest that the event loop was late."""
    cpu_ms: float
    """Longest that it worked without a break; the rest is other threads and processes."""
    times: float
    answer: str


def main() -> None:
    """Prints the table."""
    table = Table("service", "request", "MiB", "answer", "loop ms", "own", "before", "memory", "before")
    costs = []
    for case in cases():
        cost = asyncio.run(measured(case))
        before = asyncio.run(measured(case, eager=True))
        size = case.request.ByteSize() / 2**20
        numbers = (f"{cost.loop_ms:.1f}", f"{cost.cpu_ms:.1f}", f"{before.loop_ms:.0f}")
        memory = (f"{cost.times:.1f} x", f"{before.times:.1f} x")
        table.add_row(case.service, case.name, f"{size:.2f}", cost.answer, *numbers, *memory)
        costs.append((size, cost))
    console.print(table)
    large = max(cost.times for size, cost in costs if size >= LARGE_MIB)
    small = max(size * cost.times for size, cost in costs if size < LARGE_MIB)
    slowest, busiest = max(cost.loop_ms for _, cost in costs), max(cost.cpu_ms for _, cost in costs)
    console.print(
        f"worst: the event loop {slowest:.1f} ms late (at most {MOST_MS}), {busiest:.1f} ms of them its own work; "
        f"{large:.1f} times a message of {LARGE_MIB} MiB or more (at most {MOST_TIMES}), and {small:.1f} MiB for "
        "a smaller one"
    )


async def measured(case: Case, *, eager: bool = False) -> Cost:
    """Time and memory of a request; with `eager`, of reading it as a whole."""

    async def ask() -> str:
        if eager:
            case.eager(case.request)
            return ""
        try:
            await case.ask(case.request)
        except ServiceError as error:
            return type(error).__name__
        return "answered"

    answer, gaps = "", []
    for _ in range(1 if eager else ROUNDS):
        ticking = asyncio.create_task(_longest_gap())
        await asyncio.sleep(0.02)
        answer = await ask()
        await asyncio.sleep(0.02)
        ticking.cancel()
        gaps.append(await ticking)
    with _traced() as peak:
        await ask()
    size = case.request.ByteSize()
    return Cost(
        1000 * min(gap for gap, _ in gaps), 1000 * min(cpu for _, cpu in gaps), (size + peak[0]) / size, answer
    )


async def _longest_gap() -> tuple[float, float]:
    """Longest time, until cancelled, by which the event loop was late to a task that wakes every millisecond; and the
    longest that it worked in between."""
    late = worked = 0.0
    try:
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            late = max(late, time.perf_counter() - began - TICK_S)
            worked = max(worked, time.thread_time() - cpu)
    except asyncio.CancelledError:
        return late, worked


@contextmanager
def _traced() -> Iterator[list[int]]:
    peak = [0]
    tracemalloc.start()
    try:
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def cases() -> Iterator[Case]:
    """Hostile requests, and the largest that are admitted."""
    shapes = {
        "131072 pairs of a token each": pairs(1 << 17, 1),
        "4096 pairs of a token each": pairs(4096, 1),
        "4096 pairs of 1024 tokens": pairs(4096, 512),
        "32 pairs of 131072 tokens": pairs(32, 1 << 16),
    }
    for name, message in shapes.items():
        yield Case("reward", name, reward_pb2.ScoreRequest(tokens=message), ask_reward, eager_score)
        yield Case("reference", name, reference_pb2.LogprobsRequest(pairs=message), ask_reference, eager_pairs)
        yield Case("critic", name, critic_pb2.ValuesRequest(pairs=message), ask_critic, eager_pairs)
    for name, texts in {
        "131072 empty texts": [""] * (1 << 17),
        "4096 texts of 250 words": ["w5 " * 250] * 4096,
    }.items():
        written = reward_pb2.TextPairs(prompts=["w5"] * len(texts), responses=texts)
        yield Case("reward", name, reward_pb2.ScoreRequest(texts=written), ask_reward, eager_texts)
    numbers = np.zeros(4096 * 512, "<f4").tobytes()
    request = critic_pb2.TrainRequest(
        pairs=shapes["4096 pairs of 1024 tokens"], values=numbers, returns=numbers, step=1, epochs=1, minibatch_size=1
    )
    yield Case("critic", "Train on 4096 pairs of 1024 tokens", request, ask_train, eager_pairs)
    for count in (20_000, 4096):
        generate = rollout_pb2.GenerateRequest(
            prompts=pairs(count, 1).prompts, sampling=rollout_pb2.SamplingParams(max_new_tokens=8)
        )
        yield Case("rollout", f"{count} prompts of a token each", generate, ask_rollout, eager_prompts)
    stops = rollout_pb2.SamplingParams(max_new_tokens=8, stop_token_ids=[5] * (1 << 20))
    generate = rollout_pb2.GenerateRequest(prompts=pairs(512, 1).prompts, sampling=stops)
    yield Case("rollout", "a million stop tokens", generate, ask_rollout, eager_stops)


def pairs(count: int, tokens: int) -> common_pb2.Pairs:
    """`count` pairs, prompt and response of `tokens` tokens each."""
    sequences = common_pb2.Sequences(
        token_ids=np.full(count * tokens, 5, "<i4").tobytes(), lengths=np.full(count, tokens, "<i4").tobytes()
    )
    return common_pb2.Pairs(prompts=sequences, responses=sequences)


async def ask_reward(request: Any) -> None:
    """Score."""
    await reward().Score(request, Context())


async def ask_reference(request: Any) -> None:
    """Logprobs."""
    await reference().Logprobs(request, Context())


async def ask_critic(request: Any) -> None:
    """Values."""
    await critic().Values(request, Context())


async def ask_train(request: Any) -> None:
    """Train."""
    await critic().Train(request, Context())


async def ask_rollout(request: Any) -> None:
    """Generate."""
    async for _ in rollout().Generate(request, Context()):
        pass


def eager_pairs(request: Any) -> Any:
    """Every prompt and response an array of its own."""
    return cut(request.pairs.prompts), cut(request.pairs.responses)


def eager_score(request: Any) -> Any:
    """Besides, every one decoded."""
    prompts, responses = cut(request.tokens.prompts), cut(request.tokens.responses)
    texts = tokenizer().batch_decode([*prompts, *responses], skip_special_tokens=True)
    return [
        Scored(p, r, Pair(prompt=pt, response=rt))
        for p, r, pt, rt in zip(prompts, responses, texts[: len(prompts)], texts[len(prompts) :], strict=True)
    ]


def eager_texts(request: Any) -> Any:
    """Every text tokenized."""
    sides = (list(request.texts.prompts), list(request.texts.responses))
    return [[np.asarray(ids, np.int32) for ids in tokenizer()(side)["input_ids"]] for side in sides]


def eager_prompts(request: Any) -> Any:
    """Every prompt an array of its own."""
    return cut(request.prompts)


def eager_stops(request: Any) -> Any:
    """Every prompt with stop tokens of its own."""
    stops = tuple(request.sampling.stop_token_ids)
    return [list(stops) for _ in cut(request.prompts)[:8]]


def cut(message: common_pb2.Sequences) -> list[Any]:
    """Sequences as arrays of their own, each id looked at."""
    ids, lengths = np.frombuffer(message.token_ids, "<i4"), np.frombuffer(message.lengths, "<i4")
    assert not ((ids < 0) | (ids >= 64)).any()
    return np.split(ids, np.cumsum(lengths)[:-1])


if __name__ == "__main__":
    main()
