"""The PPO loop with everything around it faked."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.prompts import PromptStream
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected
from orchestrator.experience.stream import Stream
from orchestrator.learners import CriticLearner, Update
from orchestrator.loop.state import TrainState
from orchestrator.loop.trainer import Trainer
from orchestrator.monitoring.record import Record
from orchestrator.policy.early import early_logprobs
from orchestrator.push.pusher import PushReport
from orchestrator.tracing.activity import parts_with
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import Span, Spans
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from tests.learner_batches import PolicyBatch
from tests.unit.fakes import Fakes, Journal, make_config, make_prompts

# Two prompts a step, one response each, tokens 10 and 11: one token and two.
SECTION = {"batch_size": 2, "steps": 3, "evaluation": {"every": 2}, "seed": 4, "checkpoint": {"every": 2}}
SAVE_TO = Path("saved")


class FakePolicy:
    name, prefix = "policy", "policy"

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.batches: list[tuple[PolicyBatch, int]] = []
        self.failure: Exception | None = None
        self.meeting: asyncio.Barrier | None = None
        self.known = 1_000
        """Responses whose log-probs an update computes."""
        self.skipped_in_a_row: list[int] = []
        """Said of one batch after the other."""

    async def logprobs(self, trajectories: Columns) -> Any:
        self.journal.note("old logprobs")
        return np.full(trajectories.size("sampled"), -1.25, np.float32)

    async def trained_logprobs(self) -> list[Any]:
        self.journal.note("trained logprobs")
        rows = [np.full(len(response), -1.25, np.float32) for response in self.batches[-1][0].responses]
        return [row if index < self.known else row[:0] for index, row in enumerate(rows)]

    async def train(self, update: Update) -> dict[str, float]:
        self.journal.note("train policy")
        if self.meeting:
            await self.meeting.wait()
        if self.failure:
            raise self.failure
        self.batches.append((PolicyBatch.of(update.columns, update.kl_coef), update.seed))
        skipped = {"skipped_in_a_row": float(self.skipped_in_a_row.pop(0))} if self.skipped_in_a_row else {}
        return {"loss": 0.5, "sampled_entropy": 1.5} | skipped

    async def save(self, folder: Path) -> None:
        self.journal.note("save", str(folder))


class FakePusher:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.gate: Callable[[int], Any] = lambda version: asyncio.sleep(0)
        """Awaited before a version is delivered."""
        self.failure: Exception | None = None

    async def push(self, version: int) -> PushReport:
        self.journal.note("push", version)
        return PushReport(version, ("a",), 0.125, 1, "sum")

    async def rest(self, at_most_s: float) -> None:
        self.journal.note("rest", at_most_s)

    async def stage(self, version: int) -> int:
        self.journal.note("stage", version)
        return version

    async def deliver(self, staged: int) -> PushReport:
        await self.gate(staged)
        if self.failure:
            raise self.failure
        self.journal.note("deliver", staged)
        return PushReport(staged, ("a",), 0.125, 1, "sum")

    async def complete(self) -> None:
        self.journal.note("complete")


class FakeEvaluator:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def evaluate(self, step: int, version: int) -> dict[str, float]:
        self.journal.note("evaluate", step, version)
        return {"eval/score": float(step)}


class FakeLog:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.lines: dict[int, Mapping[str, float]] = {}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.journal.note("log", step)
        assert step not in self.lines
        self.lines[step] = metrics


class FakeCheckpoints:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.states: list[TrainState] = []
        self.failure: Exception | None = None

    async def first(self, state: TrainState) -> None:
        self.journal.note("checkpoint", state.step)
        self.states.append(state)

    async def take_if_due(self, state: TrainState, *, last: bool) -> None:
        self.journal.note("checkpoint", state.step, *["last"] * last)
        self.states.append(state)
        if self.failure:
            raise self.failure

    def last_step(self) -> int | None:
        return 0

    def waited_s(self) -> float:
        return 0.5


class FakeExperienceJournal:
    """Keeps what it is given, in memory."""

    def __init__(self) -> None:
        self.kept: dict[int, Collected] = {}

    def read(self, step: int, prompt: Any) -> Collected | None:
        return self.kept.get(step)

    def write(self, step: int, collected: Collected) -> None:
        assert step not in self.kept
        self.kept[step] = collected


class FakeProgress:
    def __init__(self, silent: bool = True) -> None:
        """A run that says something fails if it should be `silent`."""
        self.calls: list[Any] = []
        self.silent = silent

    def start(self, total_steps: int, done: int) -> None:
        self.calls.append(("start", total_steps, done))

    def before_training(self, metrics: Mapping[str, float]) -> None:
        self.calls.append("before training")

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        assert seconds_left >= 0
        self.calls.append(("step", step))

    async def pause(self) -> None:
        """Never waits."""

    def note(self, text: str) -> None:
        if self.silent:
            raise AssertionError(text)
        self.calls.append(("note", text))

    def stop(self) -> None:
        self.calls.append("stop")


class Stage:
    """A run with fakes all around."""

    def __init__(self, folder: Path, lag: int = 0, evaluates: bool = True, **section: Any) -> None:
        # The fake learner and the fake engine differ by a quarter.
        loop = {"mismatch_limit": 1.0} | section.get("loop", {})
        self.config = make_config(folder, **SECTION | section | {"loop": loop})
        used = self.config.services.used
        self.fakes = Fakes(lag, with_reference="reference" in used, with_critic="critic" in used)
        self.journal = self.fakes.journal
        self.policy, self.pusher = FakePolicy(self.journal), FakePusher(self.journal)
        self.log, self.progress = FakeLog(self.journal), FakeProgress()
        self.checkpoints, self.experience = FakeCheckpoints(self.journal), FakeExperienceJournal()
        self.evaluator = FakeEvaluator(self.journal) if evaluates else None
        self.written: list[Span] = []
        self.prompts = 2
        self.spans = Spans(self.written.extend)

    def trainer(self, first_critic_step: int | None) -> Trainer:
        """The loop, with a critic whose last step was this; None for a run without one."""
        config, services = self.config, self.fakes.services
        learners: list[Any] = [self.policy]
        if services.critic is not None and first_critic_step is not None:
            learners.append(CriticLearner(services.critic, config, first_critic_step))
        return Trainer(
            config,
            partial(
                Stream,
                config,
                PromptStream(make_prompts(self.prompts), config.seed, config.algorithm.samples_per_prompt),
                Collector(
                    services,
                    config,
                    stages=SampleStages(self.spans),
                    old_logprobs=early_logprobs(self.policy.logprobs) if config.early_logprobs else None,
                ),
                self.experience,  # type: ignore[arg-type]
            ),
            self.policy,
            learners,
            self.pusher,
            self.checkpoints,  # type: ignore[arg-type]
            self.evaluator,  # type: ignore[arg-type]
            Record(self.log, self.progress, config.steps),  # type: ignore[arg-type]
            Waits(self.spans, parts_with([learner.name for learner in learners])),
        )

    async def run(self, policy_version: int = 0, critic_step: int = 0) -> None:
        first = critic_step if self.fakes.with_critic else None
        await self.go_on(TrainState(step=0, first_version=policy_version + 1, first_critic_step=first), resumed=False)

    async def go_on(self, state: TrainState, resumed: bool = True) -> None:
        await self.trainer(state.first_critic_step).run(state, SAVE_TO, resumed=resumed)
