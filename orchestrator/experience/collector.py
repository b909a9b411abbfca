"""Collects experience: every sample is scored, referenced and valued as soon as it is finished."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.experience.checks import (
    check_own_logprobs,
    check_rows,
    check_samples,
    check_scorer,
    check_scores,
    within,
)
from orchestrator.experience.experience import Collected, Experience, Finished
from orchestrator.experience.pairs import Pairs
from orchestrator.experience.requests import SampleRequest, calls
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import UNTRACED
from quartet.wire.codec import Floats
from quartet.wire.ragged import Ragged
from services.rollout.sample import Sample, Sampling

SCORING = "timeouts.score_s"
OldLogprobs = Callable[[Ragged, Ragged], Awaitable[list[Floats]]]
"""Log-probs of responses under the weights that will be trained on them, from prompts and responses."""


class Collector:
    """Turns prompts into experience through the services."""

    def __init__(
        self,
        services: Services,
        config: OrchestratorConfig,
        end_ids: Sequence[int] = (),
        stages: SampleStages | None = None,
        old_logprobs: OldLogprobs | None = None,
    ) -> None:
        """
        Args:
            services: clients of the services.
            config: sampling, sizes of calls and deadlines.
            end_ids: the tokens that end a response; needed if the configuration has a least length.
            stages: records when each sample was generated, scored, referenced, valued and given its old log-probs.
            old_logprobs: asked for each finished sample; None leaves them for later.
        """
        self._services = services
        self._end_ids = end_ids
        self._config = config
        self._old_logprobs = old_logprobs
        self._scorer = ""
        self.stages = stages or SampleStages(UNTRACED)
        """The stages of samples, those under way too."""

    async def collect(
        self,
        requests: Sequence[SampleRequest],
        *,
        version: int | None,
        newest: int | None = None,
        critic_step: int | None,
    ) -> Collected:
        """One experience for each request, in their order. Arguments and errors as of `finish`."""
        finished: list[Finished] = []
        repeats: list[int] = []
        given: dict[str, Any] = {"version": version, "newest": newest, "critic_step": critic_step}
        async with asyncio.TaskGroup() as group:
            for asked in calls(requests, self._config.prompts_per_call):
                group.create_task(self.finish(asked, put=finished.append, on_repeat=repeats.append, **given))
        return Collected.of(finished, sum(repeats))

    async def finish(
        self,
        requests: Sequence[SampleRequest],
        *,
        version: int | None,
        newest: int | None = None,
        critic_step: int | None,
        put: Callable[[Finished], None],
        on_repeat: Callable[[int], None],
    ) -> None:
        """Finishes the experience of each request of one Generate call, each as soon as its sample has come.

        Waits for all services. If one fails beyond its client's retries, the other calls are cancelled, and cancelled
        Generate calls abort their requests in the engines.

        Args:
            requests: prompts and seeds.
            version: the oldest policy version that may serve this; None for any.
            newest: the newest version that may; None for any from `version` on.
            critic_step: the least step that the critic must have trained; None leaves the critic out.
            put: called with each experience when it is complete.
            on_repeat: called with the number of samples that are asked for again.
        """
        asked = time.monotonic()

        async def complete(samples: Sequence[Sample]) -> None:
            sampled = time.monotonic()
            for experience in await self._complete([requests[s.index] for s in samples], samples, critic_step):
                put(Finished(experience, asked, sampled, time.monotonic()))

        # One task group for both kinds of calls: with two, a failure in one would race with new tasks of the other.
        async with asyncio.TaskGroup() as group:
            with (
                self.stages("generate", [request.number for request in requests]) as finished,
                within(self._deadline),
            ):
                async for samples in self._samples(requests, version or 0, newest, on_repeat):
                    for sample in samples:
                        finished(requests[sample.index].number, tokens=len(sample.response_ids))
                    group.create_task(complete(samples))

    async def value(self, collected: Collected, critic_step: int) -> Collected:
        """The same batch with the values of the critic after `critic_step` or a later step."""
        values = await self._values(collected.pairs, critic_step)
        valued = zip(collected.experiences, values, strict=True)
        return replace(collected, experiences=[replace(e, values=row) for e, row in valued])

    @property
    def _deadline(self) -> str:
        """The key that sets the deadline of a Generate call, and what it is multiplied with."""
        ahead = self._config.loop.ahead
        return "timeouts.generate_s" + (f" times {1 + ahead} batches under way" if ahead else "")

    def _samples(
        self,
        requests: Sequence[SampleRequest],
        version: int,
        newest: int | None,
        on_repeat: Callable[[int], None],
    ) -> AsyncIterator[list[Sample]]:
        seeds = [request.seed for request in requests if request.seed is not None]
        sampling = self._config.sampling
        return self._services.rollout.generate(
            [request.prompt.prompt_ids for request in requests],
            Sampling(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                min_new_tokens=sampling.min_new_tokens,
                stop_token_ids=sampling.stop_token_ids,
            ),
            seeds=seeds or None,
            min_version=version,
            max_version=newest,
            timeout_s=self._config.longest_generate_s,
            stall_s=self._config.timeouts.stall_s,
            on_repeat=on_repeat,
        )

    async def _complete(
        self, requests: Sequence[SampleRequest], samples: Sequence[Sample], critic_step: int | None
    ) -> list[Experience]:
        numbers, prompts = [request.number for request in requests], [request.prompt for request in requests]
        check_samples(prompts, samples)
        pairs = Pairs.of(numbers, prompts, samples)
        async with asyncio.TaskGroup() as group:
            scores = group.create_task(self._scores(pairs))
            reference = group.create_task(self._references(pairs))
            critic = group.create_task(self._values(pairs, critic_step))
            policy = group.create_task(self._own(pairs))
        answers = (task.result() for task in (scores, reference, critic, policy))
        rows = zip(numbers, prompts, samples, *answers, strict=True)
        return [
            Experience(number, prompt, sample, float(score), row, values, own)
            for number, prompt, sample, score, row, values, own in rows
        ]

    async def _scores(self, pairs: Pairs) -> Floats:
        """Scores, [B]."""
        with self.stages("score", pairs.numbers), within(SCORING):
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
        with self.stages("reference", pairs.numbers), within(SCORING):
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

    async def _values(self, pairs: Pairs, critic_step: int | None) -> list[Floats]:
        """Values by the critic after `critic_step` or a later step, B times [T]; empty arrays without a step, or if
        the run has no critic."""
        if critic_step is None or self._services.critic is None:
            return [np.empty(0, np.float32)] * len(pairs.samples)
        with self.stages("value", pairs.numbers), within(SCORING):
            answer = await self._services.critic.values(
                pairs.prompt_ids, pairs.responses, min_step=critic_step, timeout_s=self._config.timeouts.score_s
            )
        check_rows("critic.Values", "values", pairs.prompts, answer.rows, pairs.samples)
        return list(answer.rows)

    async def _own(self, pairs: Pairs) -> list[Floats]:
        """The learner's own log-probs; empty arrays where they are left for later."""
        if self._old_logprobs is None:
            return [np.empty(0, np.float32)] * len(pairs.samples)
        with self.stages("logprobs", pairs.numbers):
            rows = await self._old_logprobs(pairs.prompt_ids, pairs.responses)
        check_own_logprobs(rows)
        return rows
