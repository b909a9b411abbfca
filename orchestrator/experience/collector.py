"""Collects experience: every sample is scored, referenced and valued as soon as it is finished."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt
from orchestrator.experience.checks import check_rows, check_samples, check_scorer, check_scores
from orchestrator.experience.pairs import Pairs
from orchestrator.experience.requests import SampleRequest
from orchestrator.experience.values import Valued, ask_values
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import UNTRACED
from services.common.wire.codec import Floats
from services.rollout.sample import FinishReason, Sample, Sampling


@dataclass(frozen=True, slots=True)
class Experience:
    """One response of T tokens with its score, log-probs and values."""

    number: int
    """Number of the sample, as in SampleRequest."""
    prompt: Prompt
    sample: Sample
    score: float
    """Score of the reward service."""
    ref_logprobs: Floats
    """The reference's log-probs, [T]; empty if the run has no reference."""
    values: Floats
    """The critic's values, [T]; empty if they were not requested."""
    after: float = 0.0
    """The value after the last token, as in Valued."""

    @property
    def truncated(self) -> bool:
        """True if the length limit cut it off."""
        return self.sample.finish_reason is FinishReason.LENGTH

    @property
    def kl(self) -> float:
        """Sum over the response of log pi - log pi_ref: the k1 estimate, in nats. NaN without a reference."""
        if not len(self.ref_logprobs):
            return math.nan
        return float((self.sample.logprobs - self.ref_logprobs).sum())


@dataclass(frozen=True, slots=True)
class Collected:
    """One batch of experience, in the order of its requests."""

    experiences: list[Experience]
    generate_s: float
    """Seconds from the first request to the last finished sample."""
    score_s: float
    """Seconds that scoring took after that."""
    repeated: int = 0
    """Number of requests for samples that were repeated because their replica was lost, stuck or too old. No sample
    is in `experiences` twice."""

    @property
    def valued(self) -> bool:
        """True if every response has its values."""
        return all(len(e.values) == len(e.sample.response_ids) for e in self.experiences)

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return sum(len(experience.sample.response_ids) for experience in self.experiences)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requests of a batch, and their results so far."""

    requests: Sequence[SampleRequest]
    version: int | None
    newest: int | None
    critic_step: int | None
    finished: dict[int, Experience] = field(default_factory=dict)
    repeats: list[int] = field(default_factory=list)


class Collector:
    """Turns prompts into experience through the services."""

    def __init__(
        self,
        services: Services,
        config: OrchestratorConfig,
        end_ids: Sequence[int] = (),
        stages: SampleStages | None = None,
    ) -> None:
        """
        Args:
            services: clients of the services.
            config: sampling, sizes of calls and deadlines.
            end_ids: the tokens that end a response; needed if the configuration has a least length.
            stages: records when each sample was generated, scored, referenced and valued.
        """
        self._services = services
        self._end_ids = end_ids
        self._config = config
        self._scorer = ""
        self._stages = stages or SampleStages(UNTRACED)

    async def collect(
        self,
        requests: Sequence[SampleRequest],
        *,
        version: int | None,
        newest: int | None = None,
        critic_step: int | None,
    ) -> Collected:
        """One experience for each request.

        Waits for all services. If one fails beyond its client's retries, the other calls are cancelled, and cancelled
        Generate calls abort their requests in the engines.

        Args:
            requests: prompts and seeds.
            version: the oldest policy version that may serve this; None for any.
            newest: the newest version that may; None for any from `version` on.
            critic_step: the least step that the critic must have trained; None leaves the critic out.
        """
        start = time.monotonic()
        batch = _Batch(requests, version, newest, critic_step)
        size = self._config.prompts_per_call
        # One task group for both kinds of calls: with two, a failure in one would race with new tasks of the other.
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(self._generate(batch, first, group)) for first in range(0, len(requests), size)
            ]
            await asyncio.gather(*calls, return_exceptions=True)
            generated = time.monotonic()
        experiences = [batch.finished[index] for index in range(len(requests))]
        return Collected(experiences, generated - start, time.monotonic() - generated, sum(batch.repeats))

    async def value(self, collected: Collected, critic_step: int) -> Collected:
        """The same batch with the values of the critic after `critic_step` or a later step."""
        experiences = collected.experiences
        pairs = Pairs.of(
            [e.number for e in experiences], [e.prompt for e in experiences], [e.sample for e in experiences]
        )
        values = await self._values(pairs, critic_step)
        valued = zip(experiences, values, strict=True)
        return replace(collected, experiences=[replace(e, values=v.values, after=v.after) for e, v in valued])

    async def _generate(self, batch: _Batch, first: int, group: asyncio.TaskGroup) -> None:
        asked = batch.requests[first : first + self._config.prompts_per_call]
        seeds = [request.seed for request in asked if request.seed is not None]
        sampling = self._config.sampling
        stream = self._services.rollout.generate(
            [request.prompt.prompt_ids for request in asked],
            Sampling(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                min_new_tokens=sampling.min_new_tokens,
                stop_token_ids=sampling.stop_token_ids,
            ),
            seeds=seeds or None,
            min_version=batch.version or 0,
            max_version=batch.newest,
            timeout_s=self._config.timeouts.generate_s,
            stall_s=self._config.timeouts.stall_s,
            on_repeat=batch.repeats.append,
        )
        with self._stages("generate", [request.number for request in asked]) as finished:
            async for samples in stream:
                for sample in samples:
                    finished(asked[sample.index].number)
                group.create_task(self._complete(batch, first, samples))

    async def _complete(self, batch: _Batch, first: int, samples: Sequence[Sample]) -> None:
        requests = [batch.requests[first + sample.index] for sample in samples]
        prompts = [request.prompt for request in requests]
        check_samples(prompts, samples)
        pairs = Pairs.of([request.number for request in requests], prompts, samples)
        async with asyncio.TaskGroup() as group:
            scores = group.create_task(self._scores(pairs))
            reference = group.create_task(self._references(pairs))
            critic = group.create_task(self._values(pairs, batch.critic_step))
        valued = critic.result()
        for row, (request, sample) in enumerate(zip(requests, samples, strict=True)):
            batch.finished[first + sample.index] = Experience(
                number=request.number,
                prompt=request.prompt,
                sample=sample,
                score=float(scores.result()[row]),
                ref_logprobs=reference.result()[row],
                values=valued[row].values,
                after=valued[row].after,
            )

    async def _scores(self, pairs: Pairs) -> Floats:
        """Scores, [B]."""
        with self._stages("score", pairs.numbers):
            scores = await self._services.reward.score(
                pairs.prompt_ids,
                pairs.responses,
                labels=pairs.labels,
                ended=pairs.ended,
                timeout_s=self._config.timeouts.score_s,
            )
        self._scorer = check_scorer(self._scorer, scores)
        check_scores(pairs.prompts, scores.values)
        return scores.values

    async def _references(self, pairs: Pairs) -> list[Floats]:
        """The reference's log-probs, B times [T]; empty arrays if the run has no reference."""
        if self._services.reference is None:
            return [np.empty(0, np.float32)] * len(pairs.samples)
        sampling = self._config.sampling
        with self._stages("reference", pairs.numbers):
            rows = await self._services.reference.logprobs(
                pairs.prompt_ids,
                pairs.responses,
                temperature=sampling.temperature,
                min_new_tokens=sampling.min_new_tokens,
                end_ids=self._end_ids if sampling.min_new_tokens else (),
                timeout_s=self._config.timeouts.score_s,
            )
        check_rows("reference.Logprobs", "ref_logprobs", pairs.prompts, rows, pairs.samples)
        return rows

    async def _values(self, pairs: Pairs, critic_step: int | None) -> list[Valued]:
        """The critic's values; empty arrays without a step, or if the run has no critic."""
        if critic_step is None or self._services.critic is None:
            return [Valued(np.empty(0, np.float32), 0.0)] * len(pairs.samples)
        with self._stages("value", pairs.numbers):
            return await ask_values(self._services.critic, self._config, pairs, critic_step)
