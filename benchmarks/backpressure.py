"""Memory and samples in flight of the orchestrator while the reward service is 20 times slower than usual.

    python -m benchmarks.backpressure [--seconds 60] [--around 20] [--pause 15] [--staleness 1]

Real Serve, proxy, gRPC, replicas, clients and loop; the models and the push sleep (benchmarks/emulated). A run goes
on for `--around` seconds, then for `--seconds` with the slow reward, then for `--around` again, each counted from
`--pause` seconds after the change, when the calls of the time before have come to their end. Prints for each of the
three the resident memory of this process, which runs the loop, in the median and at most; the most samples that were
asked for and not complete, of those that the slots allow; the seconds per step; and how often Score was sent per
step: more than once where a client's patience ended. A service that fails, and a deadline that passes, end the
benchmark with their error.

Goals: memory within 5 % of the time before, no more samples than allowed, and the old pace afterwards.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Annotated, Any, Self

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.emulated.pace import Pace
from benchmarks.emulated.quartet import BATCH, Quartet, quartet
from benchmarks.emulated.run import Line, Run
from orchestrator.clients import Services
from quartet.security.credentials import connect
from quartet.wire.callers import Purpose, declared
from services.reward.client import RewardClient

PACE = Pace(
    generate=0.6, score=0.3, reference=0.1, values=0.1, logprobs=0.1,
    train=0.5, train_critic=0.4, stage=0.05, deliver=0.05,
)  # fmt: skip
PHASES = {"as usual": PACE, "20 times slower": PACE.with_slower_reward(20), "as usual again": PACE}
LOOK_S = 0.2
console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Look:
    """A look at the orchestrator's process."""

    at: float
    """Moment, in seconds of the monotonic clock."""
    mib: float
    """Resident memory."""
    in_flight: int
    """Samples that were asked for and are not complete."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Memory, samples in flight and steps in a stretch of time."""

    mib: float
    """Resident memory in the median."""
    most_mib: float
    """Most resident memory."""
    in_flight: int
    """Most samples in flight."""
    step_s: float
    """Mean seconds of the steps that ended in it; NaN if none did."""
    steps: int

    @classmethod
    def of(cls, looks: Sequence[Look], lines: Sequence[Line], began: float, ended: float) -> Self:
        """The stretch from `began` to `ended`."""
        seen = [look for look in looks if began <= look.at < ended]
        walls = [line["seconds/wall"] for line in lines if began <= line["at"] < ended]
        sizes = [look.mib for look in seen]
        in_flight = max(look.in_flight for look in seen)
        return cls(median(sizes), max(sizes), in_flight, mean(walls) if walls else float("nan"), len(walls))


class CountingReward(RewardClient):
    """A client that counts how often it sends a call, repetitions included."""

    sent = 0

    async def _attempt(self, *call: Any) -> Any:
        self.sent += 1
        return await super()._attempt(*call)


def main(
    seconds: Annotated[float, typer.Option(min=1)] = 60.0,
    around: Annotated[float, typer.Option(min=1)] = 20.0,
    pause: Annotated[float, typer.Option(min=1)] = 15.0,
    staleness: Annotated[int, typer.Option(min=0)] = 1,
) -> None:
    """Runs the benchmark and prints its results."""
    with quartet(PACE) as services:
        console.print(asyncio.run(_measured(services, (around, seconds, around), pause, staleness)))


async def _measured(services: Quartet, lengths: Sequence[float], pause: float, staleness: int) -> Table:
    config = services.config
    clients, metadata = Services.connect(config), declared(config.name, Purpose.TRAINING)
    reward = CountingReward(connect(config.target), attempt_s=config.timeouts.attempt_s, metadata=metadata)
    run = Run(config, replace(clients, reward=reward), PACE, staleness=staleness, steps=1_000_000)
    lines: list[Line] = []
    looks: list[Look] = []
    table = Table(
        "reward", "MiB", "most MiB", "most in flight", "may be", "s per step", "steps", "Score sent per step"
    )
    going = [asyncio.create_task(run.finish(lines.append)), asyncio.create_task(_look(run, looks))]
    try:
        for (name, pace), length in zip(PHASES.items(), lengths, strict=True):
            services.set(pace)
            await _pass(pause, going)
            began, sent = time.monotonic(), reward.sent
            await _pass(length, going)
            stretch = Stretch.of(looks, lines, began, time.monotonic())
            table.add_row(name, *described(stretch, (staleness + 1) * BATCH, reward.sent - sent))
    finally:
        for task in going:
            task.cancel()
        await asyncio.wait(going)
        await reward.close()
        await clients.close()
    return table


def described(stretch: Stretch, allowed: int, sent: int) -> list[str]:
    """The cells of a row. `allowed`: samples that the slots allow in flight; `sent`: calls of Score."""
    memory = (f"{stretch.mib:.1f}", f"{stretch.most_mib:.1f}", str(stretch.in_flight), str(allowed))
    return [*memory, f"{stretch.step_s:.2f}", str(stretch.steps), f"{sent / max(stretch.steps, 1):.2f}"]


async def _pass(seconds: float, going: Sequence[asyncio.Task[Any]]) -> None:
    """Lets time pass; raises the error of what should go on."""
    done, _ = await asyncio.wait(going, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError("the run ended")


async def _look(run: Run, looks: list[Look]) -> None:
    process = psutil.Process(os.getpid())
    while True:
        looks.append(Look(time.monotonic(), process.memory_info().rss / 2**20, run.collector.in_flight))
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    typer.run(main)
