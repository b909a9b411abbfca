"""Collecting experience: every sample is scored, referenced and valued as soon as it is finished."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.config import OrchestratorConfig
from orchestrator.data import Prompt
from orchestrator.services import Services
from services.common.arrays import Floats
from services.rollout.sample import FinishReason, Sample, Sampling


@dataclass(frozen=True, slots=True)
class Experience:
    """One response and all that was said of it. T response tokens."""

    prompt: Prompt
    sample: Sample
    score: float
    """The reward service's."""
    ref_logprobs: Floats
    """[T]"""
    values: Floats
    """[T]; empty where they were not asked for"""

    @property
    def truncated(self) -> bool:
        """Cut off by the length limit."""
        return self.sample.finish_reason is FinishReason.LENGTH

    @property
    def kl(self) -> float:
        """Sum over the response of log pi - log pi_ref: the k1 estimate, in nats."""
        return float((self.sample.logprobs - self.ref_logprobs).sum())


@dataclass(frozen=True, slots=True)
class Collected:
    """One batch of experience, in the order of its prompts."""

    experiences: list[Experience]
    generate_s: float
    """From the first request to the last finished sample."""
    score_s: float
    """What scoring took beyond that."""
    repeated: int = 0
    """Samples that were asked for once more because their replica was lost, stuck or too old. Each of those counts
    once for every repetition; none is in `experiences` twice."""

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(len(experience.sample.response_ids) for experience in self.experiences)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is asked for, and what came of it so far."""

    prompts: Sequence[Prompt]
    step: int
    version: int | None
    critic_step: int | None
    finished: dict[int, Experience] = field(default_factory=dict)
    repeats: list[int] = field(default_factory=list)


class Collector:
    """Turns prompts into experience through the services."""

    def __init__(self, services: Services, config: OrchestratorConfig) -> None:
        self._services = services
        self._config = config

    async def collect(
        self, prompts: Sequence[Prompt], *, step: int, version: int | None, critic_step: int | None
    ) -> Collected:
        """One experience per prompt.

        Consumes nothing but its arguments; waits for all four services; any that fails beyond its client's
        retries cancels the rest, and the cancelled Generate calls abort their requests in the engines.

        Args:
            prompts: what to respond to.
            step: which PPO step this is, for the sampling seeds.
            version: the policy version that is to serve this; None for any.
            critic_step: the step that the critic has trained last; None leaves the critic out.
        """
        start = time.monotonic()
        batch = _Batch(prompts, step, version, critic_step)
        size = self._config.prompts_per_call
        # One group for both kinds of calls: with two, a failure in one would race with new tasks from the other.
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._generate(batch, first, group)) for first in range(0, len(prompts), size)]
            await asyncio.gather(*calls, return_exceptions=True)
            generated = time.monotonic()
        experiences = [batch.finished[index] for index in range(len(prompts))]
        return Collected(experiences, generated - start, time.monotonic() - generated, sum(batch.repeats))

    async def _generate(self, batch: _Batch, first: int, group: asyncio.TaskGroup) -> None:
        asked = batch.prompts[first : first + self._config.prompts_per_call]
        sampling = self._config.sampling
        stream = self._services.rollout.generate(
            [prompt.prompt_ids for prompt in asked],
            Sampling(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                min_new_tokens=sampling.min_new_tokens,
            ),
            seeds=self._seeds(batch.step, first, len(asked)),
            min_version=batch.version or 0,
            max_version=batch.version,
            timeout_s=self._config.timeouts.generate_s,
            stall_s=self._config.timeouts.stall_s,
            on_repeat=batch.repeats.append,
        )
        async for samples in stream:
            group.create_task(self._judge(batch, first, samples))

    def _seeds(self, step: int, first: int, count: int) -> list[int] | None:
        """One seed per sample, different for every step and row of the batch, however it is cut into calls."""
        if not self._config.sampling.seeded:
            return None
        draws = np.random.SeedSequence([self._config.seed, step]).generate_state(first + count, np.uint64)
        return [int(draw >> 1) for draw in draws[first:]]

    async def _judge(self, batch: _Batch, first: int, samples: Sequence[Sample]) -> None:
        asked = [batch.prompts[first + sample.index] for sample in samples]
        prompts = [prompt.prompt_ids for prompt in asked]
        responses = [sample.response_ids for sample in samples]
        labels = [prompt.label for prompt in asked]
        deadline = self._config.timeouts.score_s
        temperature = self._config.sampling.temperature
        async with asyncio.TaskGroup() as group:
            scores = group.create_task(
                self._services.reward.score(prompts, responses, labels=labels, timeout_s=deadline)
            )
            reference = group.create_task(
                self._services.reference.logprobs(prompts, responses, temperature=temperature, timeout_s=deadline)
            )
            if batch.critic_step is not None:
                critic = group.create_task(
                    self._services.critic.values(prompts, responses, last_step=batch.critic_step, timeout_s=deadline)
                )
        values = [np.empty(0, np.float32)] * len(samples) if batch.critic_step is None else critic.result()
        for row, sample in enumerate(samples):
            batch.finished[first + sample.index] = Experience(
                prompt=asked[row],
                sample=sample,
                score=float(scores.result().values[row]),
                ref_logprobs=reference.result()[row],
                values=values[row],
            )
