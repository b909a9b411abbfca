"""Services that answer by rule, for tests of the orchestrator."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt
from orchestrator.experience.requests import SampleRequest
from quartet.columns import Columns
from quartet.wire.outcomes import Unscored
from services.critic.client import Values
from services.reward.client import Parts, Scores
from services.rollout.sample import FinishReason, Sample, Sampling


def make_config(folder: Path, **section: Any) -> OrchestratorConfig:
    """A run with the policy in `folder`; dictionaries in `section` stand for nested sections."""
    policy = {"model": str(folder), "optimizer": {"learning_rate": 1e-4}}
    least = {"name": "run", "data": {"path": "prompts"}, "policy": policy, "algorithm": {"minibatch_size": 1}}
    return OrchestratorConfig.parse(least | section, "orchestrator")


def make_prompts(count: int) -> list[Prompt]:
    """Prompt i is the token 10 + i, and its label is its row."""
    return [Prompt(index, np.asarray([10 + index], np.int32), f"w{10 + index}", str(index)) for index in range(count)]


def make_requests(count: int) -> list[SampleRequest]:
    """Sample i responds to prompt i, with the seed 100 + i."""
    return [SampleRequest(index, prompt, 100 + index, index) for index, prompt in enumerate(make_prompts(count))]


def respond(index: int, prompt: Any, version: int = 1) -> Sample:
    """A response of the prompt's token, so many times as that token less 9; even prompts end by themselves."""
    length = int(prompt[0]) - 9
    reason = FinishReason.LENGTH if prompt[0] % 2 else FinishReason.STOP
    ids, logprobs = np.full(length, prompt[0], np.int32), np.full(length, -1.0, np.float32)
    return Sample(index, ids, logprobs, reason, ((version, 0, length),))


@dataclass
class Journal:
    """Notes the events in their order."""

    events: list[Any] = field(default_factory=list)

    def note(self, *event: Any) -> None:
        self.events.append(event if len(event) > 1 else event[0])

    def names(self) -> list[str]:
        return [event[0] if isinstance(event, tuple) else event for event in self.events]


class FakeRollout:
    """Streams the samples last prompt first, one at a time; before each it awaits `gate`."""

    def __init__(self, journal: Journal, lag: int = 0) -> None:
        self.journal, self.lag = journal, lag
        self.calls: list[dict[str, Any]] = []
        self.gate: Callable[[int], Any] = lambda sent: asyncio.sleep(0)
        self.respond: Callable[[int, Any, int], Sample] = respond
        self.repeats: list[int] = []
        """Told to the caller, one a call."""
        self.cancelled = 0

    async def generate(
        self,
        prompts: Sequence[Any],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None,
        min_version: int,
        max_version: int | None,
        timeout_s: float,
        stall_s: float,
        on_repeat: Callable[[int], None],
    ) -> AsyncIterator[list[Sample]]:
        self.journal.note("generate")
        if self.repeats:
            on_repeat(self.repeats.pop(0))
        options = {
            "seeds": seeds,
            "versions": (min_version, max_version),
            "timeout_s": timeout_s,
        }
        self.calls.append({"prompts": prompts, "sampling": sampling, **options})
        try:
            for sent, index in enumerate(reversed(range(len(prompts)))):
                await self.gate(sent)
                yield [self.respond(index, prompts[index], min_version - self.lag)]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@dataclass
class FakeAsk:
    """One of the services that judge samples: answers at once unless it fails or hangs."""

    name: str
    journal: Journal
    answer: Callable[[Any], Any]
    calls: list[dict[str, Any]] = field(default_factory=list)
    failure: Exception | None = None
    hangs: bool = False
    cancelled: int = 0

    async def ask(self, trajectories: Columns, **options: Any) -> list[Any]:
        self.journal.note(self.name)
        responses = trajectories.responses
        self.calls.append({"prompts": trajectories.prompts, "responses": responses, **options})
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.failure:
            raise self.failure
        return [self.answer(response) for response in responses]

    def responses(self) -> list[list[int]]:
        """Everything asked about."""
        return sorted(response.tolist() for call in self.calls for response in call["responses"])


class FakeReward(FakeAsk):
    """The score of a response is its first token; with `names` the answer is a number for each of them, or it is an
    Unscored."""

    scorer = "model:fake"
    names: tuple[str, ...] = ("score",)
    parts: Callable[[list[int]], list[tuple[int, int, float]]] | None = None
    """Takes the numbers of sampled tokens, and gives the parts of the scores: pair, place, reward."""

    async def score(self, trajectories: Columns, **known: Any) -> Scores:
        scores = await self.ask(trajectories, **known)
        unscored = {index: each for index, each in enumerate(scores) if isinstance(each, Unscored)}
        nothing = [np.nan] * len(self.names)
        rows = [nothing if index in unscored else each for index, each in enumerate(scores)]
        table = np.asarray(rows, np.float32).reshape(-1, len(self.names))
        by_name = dict(zip(self.names, np.ascontiguousarray(table.T), strict=True))
        return Scores(by_name, self.scorer, "hash", unscored, self._parts(trajectories))

    def _parts(self, trajectories: Columns) -> Parts | None:
        if self.parts is None:
            return None
        pairs, places, rewards = np.asarray(self.parts(trajectories.counts.tolist())).reshape(-1, 3).T
        return Parts(pairs.astype(np.int64), places.astype(np.int64), rewards.astype(np.float32))


def _sampled(columns: Columns, rows: Sequence[Any]) -> Any:
    """The numbers of sampled tokens, of those of all response tokens, which may be too many or too few."""
    numbers = np.concatenate(rows)
    return numbers if columns.single_turn else numbers[columns.response_mask]


class FakeReference(FakeAsk):
    async def logprobs(self, columns: Columns, **asked: Any) -> Any:
        return _sampled(columns, await self.ask(columns, **asked))


@dataclass
class FakeCritic(FakeAsk):
    trained: list[dict[str, Any]] = field(default_factory=list)
    meeting: asyncio.Barrier | None = None
    """Barrier at which training waits for another."""

    async def values(self, columns: Columns, *, min_step: int, timeout_s: float) -> Values:
        rows = await self.ask(columns, min_step=min_step, timeout_s=timeout_s)
        return Values(_sampled(columns, rows), [min_step] * len(rows))

    async def train(self, step: int, batch: Columns, **options: Any) -> dict[str, float]:
        self.journal.note("train critic", step)
        if self.meeting:
            await self.meeting.wait()
        rows = {name: batch.rows(name) for name in ("values", "returns")}
        trained = batch.rows("trained") if "trained" in batch else None
        self.trained.append({**rows, "trained": trained, "responses": batch.responses, **options})
        return {"loss": 0.25, "grad_norm": 2.0}


@dataclass
class Fakes:
    """The four services, and what was asked of them in order."""

    lag: int = 0
    journal: Journal = field(default_factory=Journal)
    with_reference: bool = True
    with_critic: bool = True

    def __post_init__(self) -> None:
        self.rollout = FakeRollout(self.journal, self.lag)
        self.reward = FakeReward("score", self.journal, lambda response: float(response[0]))
        self.reference = FakeReference("logprobs", self.journal, lambda r: np.full(len(r), -1.5, np.float32))
        self.critic = FakeCritic("values", self.journal, lambda r: np.full(len(r), 0.5, np.float32))

    @property
    def services(self) -> Services:
        reference = self.reference if self.with_reference else None
        critic = self.critic if self.with_critic else None
        return Services(self.rollout, self.reward, reference, critic)  # type: ignore[arg-type]
