"""One random schedule: a run that is delayed, fails, is killed and resumed, and what became of its samples."""

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.emulated.silent import Silent
from benchmarks.staleness.services import Chance, Judges, Pusher, Replicas
from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt, PromptStream
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected
from orchestrator.experience.requests import training_requests
from orchestrator.experience.stream import Stream
from orchestrator.learners import Update
from orchestrator.loop.state import TrainState
from orchestrator.loop.trainer import Trainer
from orchestrator.monitoring.record import Record
from orchestrator.tracing.spans import UNTRACED
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from quartet.wire.errors import Unavailable, leaves
from tests.unit.virtual_time import VirtualLoop

STEPS = 10


@dataclass
class Outcome:
    """Samples of one schedule, counted."""

    staleness: int
    depth: int
    restarts: int = 0
    over_bound: int = 0
    discarded: int = 0
    lost: int = 0
    doubled: int = 0
    tasks_left: int = 0
    ages: list[float] = field(default_factory=list)
    """Versions between the oldest token of each sample and training."""
    token_ages: list[float] = field(default_factory=list)
    """The same, of the mean over the tokens of each sample."""
    expected: list[tuple[int, int]] = field(default_factory=list)
    """The least and the greatest age of each sample by the rule of admission, if sampling begins at once."""

    @property
    def faults(self) -> int:
        """Number of everything that must not be."""
        return self.over_bound + self.discarded + self.lost + self.doubled + self.tasks_left


class Learner:
    """Policy or critic, whose training is the list of the batches that it was trained on."""

    def __init__(self, name: str, chance: Chance) -> None:
        self.name = self.prefix = name
        self.history: list[list[list[int]]] = []
        self._chance = chance

    async def train(self, update: Update) -> dict[str, float]:
        """Trains, and records the tokens of the responses."""
        assert update.step == len(self.history) + 1
        await self._chance.spend(f"train {self.name}")
        self.history.append([row.tolist() for row in update.columns.responses])
        return {"loss": 0.0}

    async def logprobs(self, trajectories: Columns) -> Any:
        """Log-probs of its own."""
        await self._chance.spend("logprobs")
        return np.full(trajectories.size("sampled"), -1.0, np.float32)

    async def save(self, folder: Path) -> None:
        """Writes nothing."""


class Disk:
    """The journal and the last checkpoint, which survive a kill."""

    def __init__(self, chance: Chance, every: int, state: TrainState) -> None:
        self._chance, self._every = chance, every
        self.kept: dict[int, Collected] = {}
        self.state = state

    def read(self, step: int, prompt: Any) -> Collected | None:
        """Returns the batch of `step`; None if it is missing."""
        return self.kept.get(step)

    def write(self, step: int, collected: Collected) -> None:
        """Writes a batch, and deletes those of later steps."""
        self.kept = {kept: batch for kept, batch in self.kept.items() if kept < step}
        if self._chance.draw.random() > 0.05:  # else the disk was full
            self.kept[step] = collected

    async def first(self, state: TrainState) -> None:
        """Takes the first checkpoint."""
        self.state = state

    async def take_if_due(self, state: TrainState, *, last: bool) -> None:
        """Takes a checkpoint every so many steps and after the last, and forgets the batches that it covers."""
        if last or state.step % self._every == 0:
            await self._chance.spend("checkpoint")
            self.state = state
            self.kept = {step: batch for step, batch in self.kept.items() if step > state.step}

    def last_step(self) -> int:
        """Step of the last checkpoint."""
        return self.state.step

    def waited_s(self) -> float:
        """Nothing: the time is virtual."""
        return 0.0


class Evaluator:
    """An evaluation during which no replica may change its version."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def evaluate(self, step: int, version: int) -> dict[str, float]:
        """Takes a while."""
        before = list(self._replicas.served)
        await self._replicas.chance.spend("evaluate")
        assert before == self._replicas.served == [(self._replicas.timeline, version)] * len(before)
        return {}


def run(seed: int) -> Outcome:
    """Carries out the schedule of this seed."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(jumps=True)) as runner:
        return runner.run(Schedule(seed).finish())


class Schedule:
    """One run, from its start through its kills and failures to its end."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self._chance = Chance(draw, failing=draw.choice([0, 0, 0.002, 0.01]))
        self._config = config = _config(draw)
        self._replicas = Replicas(self._chance)
        prompts = [Prompt(row, np.asarray([row + 3], np.int32), "p", "") for row in range(17)]
        self._prompts = PromptStream(prompts, config.seed, config.algorithm.samples_per_prompt)
        requests = training_requests(config, self._prompts, range((STEPS + 6) * config.batch_size))
        self._replicas.number_of = {request.seed: request.number for request in requests if request.seed is not None}
        state = TrainState(step=0, first_version=1, first_critic_step=0)
        self._disk = Disk(self._chance, draw.randint(1, 4), state)
        self._learners = [Learner("policy", self._chance), Learner("value", self._chance)]
        self._kills = draw.choice([0, 1, 2, 5])
        self._sampled_from: dict[int, int] = {}
        """Number of each sample -> version that was served when the life began in which it was sampled."""

    async def finish(self) -> Outcome:
        """Runs to the end, however often it has to begin again."""
        outcome = Outcome(self._config.loop.max_staleness, self._config.loop.ahead)
        while not await self._live(outcome):
            outcome.restarts += 1
            self._chance.failing *= 0.9
            for learner in self._learners:
                del learner.history[self._disk.state.step :]
        self._count(outcome)
        return outcome

    async def _live(self, outcome: Outcome) -> bool:
        """Resumes from the last checkpoint; True if the run ended, False if it failed or was killed."""
        self._replicas.timeline += 1
        self._replicas.came = []
        state, resumed = self._disk.state, outcome.restarts > 0
        run = asyncio.create_task(self._trainer().run(state, Path("saved"), resumed=resumed))
        if self._kills:
            self._kills -= 1
            asyncio.get_running_loop().call_later(self._draw.expovariate(1 / self._length()), run.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await run
            except Exception as error:
                if not all(isinstance(leaf, Unavailable) for leaf in leaves(error)):
                    raise
        outcome.tasks_left += len(asyncio.all_tasks()) - 1
        self._sampled_from |= dict.fromkeys(self._replicas.came, state.policy_version)
        return run.done() and not run.cancelled() and run.exception() is None

    def _length(self) -> float:
        """About the length of a few steps, in virtual seconds."""
        return self._draw.uniform(0.2, 4) * (sum(self._chance.scale.values()) or 10)

    def _trainer(self) -> Trainer:
        config, silent = self._config, cast(Any, Silent())
        judges, disk, learners = cast(Any, Judges(self._chance)), cast(Any, self._disk), cast(Any, self._learners)
        collector = Collector(Services(cast(Any, self._replicas), judges, judges, judges), config)
        return Trainer(
            config,
            partial(Stream, config, self._prompts, collector, disk),
            learners[0],
            learners,
            Pusher(self._replicas),
            disk,
            cast(Any, Evaluator(self._replicas)),
            Record(silent, silent, STEPS),
            Waits(UNTRACED),
        )

    def _count(self, outcome: Outcome) -> None:
        used: Counter[int] = Counter()
        staleness, depth = outcome.staleness, outcome.depth
        for trained_on, batch in enumerate(self._learners[0].history, 1):
            for number, *versions in batch:
                used[number] += 1
                outcome.over_bound += trained_on - min(versions) > staleness
                outcome.ages.append(trained_on - min(versions))
                outcome.token_ages.append(trained_on - sum(versions) / len(versions))
                since = trained_on - self._sampled_from[number]
                outcome.expected.append((min(since, depth), min(since, depth + 1, staleness)))
        wanted = range(STEPS * self._config.batch_size)
        outcome.lost = sum(number not in used for number in wanted)
        outcome.doubled = sum(count - 1 for count in used.values())
        outcome.discarded = sum(number not in used for number in self._replicas.came)


def _config(draw: random.Random) -> OrchestratorConfig:
    """A configuration whose model is not loaded, but has to be there."""
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text("{}")
        return OrchestratorConfig.parse(_section(draw, model), "orchestrator")


def _section(draw: random.Random, model: str) -> dict[str, Any]:
    each = draw.choice([1, 1, 2, 3])
    staleness = draw.randint(0, 4)
    depth = draw.randint(1, staleness) if staleness else None
    return {
        "name": "run",
        "data": {"path": "prompts"},
        "policy": {"model": model, "optimizer": {"learning_rate": 1e-4}},
        "steps": STEPS,
        "batch_size": each * draw.randint(1, 4),
        "prompts_per_call": draw.choice([1, 2, 5, 64]),
        "algorithm": {"minibatch_size": 1, "samples_per_prompt": each},
        "loop": {"max_staleness": staleness, "depth": depth},
        "evaluation": {"every": draw.choice([0, 3])},
        "timeouts": {"take_s": 1e6},
        "seed": draw.randint(0, 999),
    }
