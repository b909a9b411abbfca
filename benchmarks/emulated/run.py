"""Runs of the real loop against the emulated quartet, with a policy and a push that sleep."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.emulated.pace import CHECKSUM, PROMPT, Pace
from benchmarks.emulated.silent import Silent
from orchestrator.clients import Services
from orchestrator.commands.beginning import first_state
from orchestrator.commands.lease import holding
from orchestrator.commands.patience import Patience
from orchestrator.config.loop import LoopConfig
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt, PromptStream
from orchestrator.experience.collector import Collector
from orchestrator.experience.stream import Stream
from orchestrator.learners import CriticLearner, Update
from orchestrator.loop.identities import identities
from orchestrator.loop.trainer import Trainer
from orchestrator.monitoring.record import Record
from orchestrator.push.pusher import WeightPusher
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import Spans
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place
from quartet.wire.codec import Floats

WEIGHTS = Manifest(("weight",), ("float32",), ((1,),), 4)
"""Manifest of a push, of a single number."""

Line = Mapping[str, float]
RUN_ID = "emulated"
PROMPTS = [Prompt(row, np.asarray([4 + row] * PROMPT, np.int32), "p", "") for row in range(40)]


class SleepingPolicy:
    """A policy that takes its time and learns nothing."""

    name = prefix = "policy"

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    async def train(self, update: Update) -> dict[str, float]:
        """Takes a step's time."""
        await asyncio.sleep(self._pace.train)
        return {"loss": 0.0}

    async def logprobs(self, trajectories: Columns) -> Floats:
        """The engine's own log-probs."""
        await asyncio.sleep(self._pace.logprobs)
        return np.full(trajectories.size("sampled"), -1.0, np.float32)

    async def save(self, folder: Path) -> None:
        """Writes nothing."""


class SleepingSource:
    """A learner whose weights take their time: to be copied, and to travel."""

    memberships = 0

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    async def places(self) -> Sequence[Place]:
        """One sender."""
        return [Place()]

    async def rendezvous(self, backend: str) -> Sequence[tuple[str, int]]:
        """A port at which no group meets."""
        return [("", 1)]

    async def manifest(self) -> bytes:
        """One weight."""
        return WEIGHTS.pack()

    async def join(self, membership: int, world_size: int) -> None:
        """Joins no group."""

    async def gather(self, push: int) -> None:
        """Takes the time of a copy."""
        await asyncio.sleep(self._pace.stage)

    async def send(self, push: int) -> str:
        """Takes the time of a delivery."""
        await asyncio.sleep(self._pace.deliver)
        return CHECKSUM

    async def abandon(self, membership: int) -> None:
        """Ends nothing."""

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends nothing."""


class Lines(Silent):
    """A metrics log that keeps its lines, and a display that prints what the user is told."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def write(self, step: int, metrics: Line) -> None:
        """Keeps the line of a step."""
        self.lines.append({"at": time.monotonic(), "step": step} | dict(metrics))

    def note(self, text: str) -> None:
        """Prints what the user would be told."""
        print(text)


class Run:
    """One run of `steps` steps at a bound on staleness."""

    def __init__(self, config: OrchestratorConfig, services: Services, pace: Pace, *, staleness: int, steps: int):
        """
        Args:
            config: configuration of the quartet.
            services: its clients.
            pace: times of the policy and the push.
            staleness: loop.max_staleness.
            steps: number of steps.
        """
        changed = {"steps": steps, "loop": LoopConfig(max_staleness=staleness)}
        self._config, self._services, self._pace = config.model_copy(update=changed), services, pace
        self._spans = Spans()
        self.collector = Collector(services, self._config, stages=SampleStages(self._spans))

    async def finish(self) -> list[Line]:
        """Carries it out; the metrics of each step, with the moment at which it ended as `at`.

        Raises the error of a service that fails beyond its client's retries.
        """
        patience = Patience(60, 30, print)
        async with holding(self._services, RUN_ID, patience, ttl_s=60, take_over=True, note=print):
            return await self._trained()

    async def _trained(self) -> list[Line]:
        config, services, pace = self._config, self._services, self._pace
        infos = await services.infos(config.timeouts.info_s)
        state = first_state(config, infos, identities(infos), lambda note: None)
        assert services.critic is not None
        assert state.first_critic_step is not None
        await services.critic.adopt(state.first_critic_step, config.timeouts.train_s)
        policy, lines = cast(Any, SleepingPolicy(pace)), Lines()
        trainer = Trainer(
            config,
            partial(Stream, config, PromptStream(PROMPTS, config.seed), self.collector, None),
            policy,
            [policy, CriticLearner(services.critic, config, state.first_critic_step)],
            WeightPusher(services.rollout, SleepingSource(pace), "gloo", config.weights),
            cast(Any, lines),
            None,
            Record(cast(Any, lines), cast(Any, lines), config.steps),
            Waits(self._spans),
        )
        await trainer.run(state, Path("saved"))
        return lines.lines
