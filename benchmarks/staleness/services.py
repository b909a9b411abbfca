"""Services that keep the contracts of the real clients, take random times, and fail at random."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.push.pusher import PushReport
from quartet.columns import Columns
from quartet.wire.errors import Unavailable
from services.critic.client import Values
from services.reward.client import Scores
from services.rollout.sample import FinishReason, Sample

REPLICAS = 2


@dataclass
class Chance:
    """Durations and failures, drawn for each call."""

    draw: random.Random
    failing: float
    """Probability that a call fails beyond its client's retries."""
    scale: dict[str, float] = field(default_factory=dict)
    """Mean duration of each kind of call, in virtual seconds."""

    async def spend(self, kind: str) -> None:
        """Takes a while, with a long tail, and then may fail."""
        await asyncio.sleep(self.draw.expovariate(1 / self.scale.setdefault(kind, 10 ** self.draw.uniform(-2, 1))))
        if self.draw.random() < self.failing:
            raise Unavailable(f"{kind} is gone")


class Replicas:
    """The rollout service: replicas that serve a version each, and sample from it.

    The tokens of a response say by which version each was sampled; the first says its number instead.
    """

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.timeline = 0
        self.served = [(0, 0)] * REPLICAS
        """The timeline and version of each replica."""
        self.changed = asyncio.Event()
        self.number_of: dict[int, int] = {}
        """Number of the sample of each seed."""
        self.came: list[int] = []
        """Numbers of the samples that came since the run was started last."""

    async def generate(
        self,
        prompts: Sequence[Any],
        sampling: Any,
        *,
        seeds: Sequence[int],
        min_version: int,
        max_version: int | None,
        timeout_s: float,
        stall_s: float,
        on_repeat: Callable[[int], None],
        **options: Any,
    ) -> AsyncIterator[list[Sample]]:
        """Yields each sample once, in the order in which they finish, as RolloutClient.generate."""
        done: asyncio.Queue[Sample] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            for index, seed in enumerate(seeds):
                group.create_task(self._sample(index, self.number_of[seed], min_version, on_repeat, done))
            for _ in seeds:
                sample = await done.get()
                self.came.append(int(sample.response_ids[0]))
                yield [sample]

    async def _sample(
        self, index: int, number: int, least: int, on_repeat: Callable[[int], None], done: "asyncio.Queue[Sample]"
    ) -> None:
        draw = self.chance.draw
        while True:
            replica = await self._replica(least)
            versions = []
            for _ in range(draw.randint(1, 4)):
                versions.append(self.served[replica][1])
                await self.chance.spend("token")
            if draw.random() > 0.05:
                break
            on_repeat(1)  # its replica was lost, with what it had sampled
        ids = np.asarray([number, *versions], np.int32)
        starts = [place for place, version in enumerate(versions) if place == 0 or version != versions[place - 1]]
        ends = [start + 1 for start in starts[1:]] + [len(ids)]
        begins = [0] + [start + 1 for start in starts[1:]]
        spans = tuple((versions[s], begin, end) for s, begin, end in zip(starts, begins, ends, strict=True))
        await done.put(Sample(index, ids, np.full(len(ids), -1.0, np.float32), FinishReason.STOP, spans))

    async def _replica(self, least: int) -> int:
        """A replica that serves this run's timeline and `least` or later; waits for one."""
        while True:
            fit = [i for i, (line, version) in enumerate(self.served) if line == self.timeline and version >= least]
            if fit:
                return self.chance.draw.choice(fit)
            self.changed.clear()
            await self.changed.wait()


class Judges:
    """Reward, reference and critic."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    async def score(self, trajectories: Columns, **options: Any) -> Scores:
        """A score for each response."""
        await self.chance.spend("score")
        scores = np.asarray([float(row[0] % 7) for row in trajectories.responses], np.float32)
        return Scores({"score": scores}, "model:fake", "hash")

    async def logprobs(self, columns: Columns, **options: Any) -> Any:
        """The reference's log-probs."""
        await self.chance.spend("reference")
        return np.full(columns.size("sampled"), -1.5, np.float32)

    async def values(self, columns: Columns, *, min_step: int, timeout_s: float) -> Values:
        """The critic's values."""
        await self.chance.spend("values")
        return Values(np.full(columns.size("sampled"), 0.5, np.float32), [min_step] * len(columns))


class Pusher:
    """The weight push: each replica swaps the weights in when it gets to it, and the push ends with the last."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._staged = -1

    async def push(self, version: int) -> PushReport:
        """Stages and delivers."""
        return await self.deliver(await self.stage(version))

    async def rest(self, at_most_s: float) -> None:
        """Nothing here has memory to release."""

    async def stage(self, version: int) -> int:
        """Copies the weights."""
        await self._replicas.chance.spend("stage")
        self._staged = version
        return version

    async def deliver(self, staged: int) -> PushReport:
        """Brings one replica after the other to the version."""
        if staged != self._staged:
            raise ValueError(f"version {staged} was staged before another; its copy is gone")
        for replica in range(REPLICAS):
            await self._replicas.chance.spend("commit")
            self._replicas.served[replica] = (self._replicas.timeline, staged)
            self._replicas.changed.set()
        return PushReport(staged, ("a", "b"), 0.1, 1, "sum")

    async def complete(self) -> None:
        """No replica joins late here."""
