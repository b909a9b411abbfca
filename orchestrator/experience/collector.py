"""Collects experience: every sample is scored, referenced and valued as soon as it is finished."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.config.unscored import PAUSE_S
from orchestrator.experience.agents import Agents
from orchestrator.experience.answers import Answers
from orchestrator.experience.checks import (
    check_own_logprobs,
    check_samples,
    check_scorer,
    check_scores,
    check_tokens,
    process_rewards,
    within,
)
from orchestrator.experience.conversation import Conversation, trajectories
from orchestrator.experience.experience import Collected, Finished, Row, score_column
from orchestrator.experience.requests import SampleRequest, calls
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import UNTRACED
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.wire.codec import Floats
from quartet.wire.errors import Internal
from quartet.wire.outcomes import MAY_PASS, Unscored
from services.rollout.sample import Sample, Sampling

SCORING = "timeouts.score_s"
LINGER_S = 0.05
"""Seconds that a conversation waits for others to go on with it, in one call."""
OldLogprobs = Callable[[Columns], Awaitable[Floats]]
"""Log-probs [M] of the sampled tokens under the weights that will be trained on them."""


class Collector:
    """Turns prompts into experience through the services."""

    def __init__(
        self,
        services: Services,
        config: OrchestratorConfig,
        end_ids: Sequence[int] = (),
        stages: SampleStages | None = None,
        old_logprobs: OldLogprobs | None = None,
        answers: Answers | None = None,
        agents: Agents | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """
        Args:
            services: clients of the services.
            config: sampling, sizes of calls and deadlines.
            end_ids: the tokens that end a response; needed if the configuration has a least length.
            stages: records when each sample was generated, scored, referenced, valued and given its old log-probs.
            old_logprobs: asked for each finished sample; None leaves them for later.
            answers: those of the run's environment; None if it has none.
            agents: have whole conversations; None if the run has no agent.
            note: called with a message for the user: for each sample that is dropped without a score, and where a
                batch takes long.
        """
        self._services = services
        self._end_ids = end_ids
        self._config = config
        self._old_logprobs = old_logprobs
        self._answers, self._agents = answers, agents
        self.note = note
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
        """The experience of each request, in the order of their numbers. Arguments and errors as of `finish`."""
        rows: list[Row] = []
        repeats: list[int] = []

        def put(finished: Finished) -> None:
            rows.extend((finished, index) for index in range(len(finished.columns)))

        given: dict[str, Any] = {"version": version, "newest": newest, "critic_step": critic_step}
        async with asyncio.TaskGroup() as group:
            for asked in calls(requests, self._config.prompts_per_call):
                group.create_task(self.finish(asked, put=put, on_repeat=repeats.append, **given))
        return Collected.of(rows, sum(repeats))

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

        Where an environment answers a response, another call goes on from all tokens of the conversation so far, by
        whatever replica has weights of `version` or later: what a lost replica had sampled is here. An agent has its
        conversations by itself.

        Waits for all services. If one fails beyond its client's retries, the other calls are cancelled, and cancelled
        Generate calls abort their requests in the engines.

        Args:
            requests: prompts and seeds.
            version: the oldest policy version that may serve this; None for any.
            newest: the newest version that may; None for any from `version` on.
            critic_step: the least step that the critic must have trained; None leaves the critic out.
            put: called with samples when they are complete.
            on_repeat: called with the number of samples that are asked for again.

        Raises:
            ExceptionGroup: the errors of services and of the environment; ConfigError for a sample without a score
                where the configuration does not drop it.
            Internal: a sample was lost.
        """
        asked, missing = time.monotonic(), len(requests)
        waiting: list[Conversation] = []

        async def complete(conversations: Sequence[Conversation]) -> None:
            sampled = time.monotonic()
            take_scored(conversations, *await self._complete(conversations, critic_step), sampled, 0)

        def take_scored(
            conversations: Sequence[Conversation],
            columns: Columns,
            unscored: Mapping[int, Unscored],
            sampled: float,
            attempt: int,
        ) -> None:
            """Puts those that are complete, and has those that have no score scored again or dropped."""
            nonlocal missing
            retried = attempt < self._config.unscored.retries
            again = {index for index, each in unscored.items() if retried and each.outcome in MAY_PASS}
            for index in again:
                group.create_task(later(conversations[index], columns.take([index]), sampled, attempt + 1))
            done = [index for index in range(len(conversations)) if index not in again]
            for index in set(done) & unscored.keys():
                self._drop(conversations[index].request, unscored[index], attempt + 1)
            prompts = [conversations[index].request.prompt for index in done]
            whole = columns if len(done) == len(columns) else columns.take(done)
            put(Finished(whole, prompts, asked, sampled, time.monotonic()))
            missing -= len(done)

        async def later(conversation: Conversation, columns: Columns, sampled: float, attempt: int) -> None:
            """Has one that had no score scored again, while others go on."""
            await asyncio.sleep(attempt * PAUSE_S)
            take_scored([conversation], *await self._scored(columns, [conversation]), sampled, attempt)

        async def respond(conversations: Sequence[Conversation]) -> None:
            """Samples the next response of each, in one call."""
            with (
                self.stages("generate", [each.request.number for each in conversations]) as finished,
                within(self._deadline),
            ):
                async for samples in self._samples(conversations, version or 0, newest, on_repeat):
                    theirs = [conversations[sample.index] for sample in samples]
                    check_samples([each.request.prompt for each in theirs], samples)
                    for each, sample in zip(theirs, samples, strict=True):
                        finished(each.request.number, tokens=len(sample.response_ids))
                    further = [each.responded(sample) for each, sample in zip(theirs, samples, strict=True)]
                    if self._answers is None:
                        group.create_task(complete(further))
                    else:
                        for conversation in further:
                            group.create_task(go_on(self._answers, conversation))

        async def go_on(answers: Answers, conversation: Conversation) -> None:
            with self.stages("answer", [conversation.request.number]):
                further = await answers.to(conversation)
            await take_further(further)

        async def have(agents: Agents, request: SampleRequest) -> None:
            with self.stages("generate", [request.number]) as finished:
                had = await agents.converse(request, version=version, newest=newest, on_repeat=on_repeat)
                finished(request.number, tokens=had.sampled)
            await take_further(had)

        async def take_further(conversation: Conversation) -> None:
            """Has it scored, or another response sampled. The first of those that come together takes all."""
            waiting.append(conversation)
            if len(waiting) == 1:
                await asyncio.sleep(LINGER_S)
                together = waiting[:]
                waiting.clear()
                if over := [each for each in together if each.segments[-1].sampled]:
                    group.create_task(complete(over))
                if others := [each for each in together if not each.segments[-1].sampled]:
                    await respond(others)

        # One task group for both kinds of calls: with two, a failure in one would race with new tasks of the other.
        async with asyncio.TaskGroup() as group:
            if self._agents is None:
                await respond([Conversation.of(request) for request in requests])
            else:
                for request in requests:
                    group.create_task(have(self._agents, request))
        if missing:  # as after a task that was cancelled by itself, which the group does not tell of
            raise Internal(f"{missing} of {len(requests)} samples were lost on their way")

    def _drop(self, request: SampleRequest, unscored: Unscored, attempts: int) -> None:
        """Tells the user of a sample that stays without a score; ConfigError unless such ones are dropped."""
        where = f"reward.Score: sample {request.number}, prompt row {request.prompt.row} has no score: {unscored}"
        if self._config.unscored.then == "end":
            raise ConfigError(
                f"{where} (attempt {attempts}, orchestrator.unscored.retries); mend it, and go on with --resume, "
                "after a change of the scorer with its service started again (`quartet down`, `quartet up`) and with "
                "--accept-changed-services, or set orchestrator.unscored.then to drop"
            )
        self.note(f"{where}; dropped")

    async def value(self, collected: Collected, critic_step: int) -> Collected:
        """The same batch with the values of the critic after `critic_step` or a later step."""
        values = await self._values(collected.columns, critic_step)
        return collected if values is None else collected.with_sampled(values=values)

    @property
    def _deadline(self) -> str:
        """The key that sets the deadline of a Generate call, and what it is multiplied with."""
        ahead = self._config.loop.ahead
        return "timeouts.generate_s" + (f" times {1 + ahead} batches under way" if ahead else "")

    def _samples(
        self,
        conversations: Sequence[Conversation],
        version: int,
        newest: int | None,
        on_repeat: Callable[[int], None],
    ) -> AsyncIterator[list[Sample]]:
        seeds = [seed for each in conversations if (seed := each.seed) is not None]
        sampling = self._config.sampling
        return self._services.rollout.generate(
            [each.ids for each in conversations],
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
        self, conversations: Sequence[Conversation], critic_step: int | None
    ) -> tuple[Columns, Mapping[int, Unscored]]:
        """The conversations with the columns of SCHEMA, NaN for scores of those that have none, and the reasons for
        which these have none."""
        columns = trajectories(conversations, turns=self._config.conversation is not None)
        async with asyncio.TaskGroup() as group:
            scored = group.create_task(self._scored(columns, conversations))
            per_token = {
                "ref_logprobs": group.create_task(self._references(columns)),
                "values": group.create_task(self._values(columns, critic_step)),
                "old_logprobs": group.create_task(self._own(columns)),
            }
        come = {name: values for name, task in per_token.items() if (values := task.result()) is not None}
        columns, unscored = scored.result()
        return columns.with_sampled(**come), unscored

    def _with_turns(self, columns: Columns) -> Columns:
        """With the rewards of turns in the score. ConfigError if there are some, and scores have names."""
        rewards = columns.get("turn_rewards")
        if rewards is None or not rewards.any():
            return columns
        if self._config.algorithm.rewards:
            raise ConfigError(
                "algorithm.rewards: names scores, to which the rewards that turns were given cannot be added; give "
                "turns none, or have one score without a name"
            )
        earned = np.bincount(columns.owners, rewards)
        return columns.with_rows(score=(columns["score"] + earned).astype(np.float32))

    async def _scored(
        self, columns: Columns, conversations: Sequence[Conversation]
    ) -> tuple[Columns, Mapping[int, Unscored]]:
        """With the scores, NaN for those that have none, and the parts that tokens earned if the scorer gives some;
        and the reasons for which some have no score."""
        further = [each.columns for each in conversations]
        with self.stages("score", columns["number"].tolist()), within(SCORING):
            scores = await self._services.reward.score(
                columns,
                labels=[each.request.prompt.label for each in conversations],
                columns=further if any(further) else (),
                groups=columns["group"].tolist(),
                ended=(~columns["truncated"]).tolist(),
                timeout_s=self._config.timeouts.score_s,
            )
        self._scorer = check_scorer(self._scorer, scores)
        names = self._config.algorithm.score_names
        check_scores(scores.columns, names)
        scored = self._with_turns(columns.with_rows(**{score_column(name): scores.columns[name] for name in names}))
        if scores.parts is not None:
            scored = scored.with_sampled(process_rewards=process_rewards(columns, scores.parts))
        return scored, scores.unscored

    async def _references(self, columns: Columns) -> Floats | None:
        """The reference's log-probs, [M]; None if the run has no reference."""
        if self._services.reference is None:
            return None
        sampling = self._config.sampling
        with self.stages("reference", columns["number"].tolist()), within(SCORING):
            values = await self._services.reference.logprobs(
                columns,
                temperature=sampling.temperature,
                min_new_tokens=sampling.min_new_tokens,
                end_ids=self._end_ids if sampling.min_new_tokens else (),
                timeout_s=self._config.timeouts.score_s,
            )
        check_tokens("reference.Logprobs", "ref_logprobs", columns, values)
        return values

    async def _values(self, columns: Columns, critic_step: int | None) -> Floats | None:
        """Values by the critic after `critic_step` or a later step, [M]; None without a step, or if the run has no
        critic."""
        if critic_step is None or self._services.critic is None:
            return None
        with self.stages("value", columns["number"].tolist()), within(SCORING):
            answer = await self._services.critic.values(
                columns, min_step=critic_step, timeout_s=self._config.timeouts.score_s
            )
        check_tokens("critic.Values", "values", columns, answer.values)
        return answer.values

    async def _own(self, columns: Columns) -> Floats | None:
        """The learner's own log-probs, [M]; None where they are left for later."""
        if self._old_logprobs is None:
            return None
        with self.stages("logprobs", columns["number"].tolist()):
            values = await self._old_logprobs(columns)
        check_own_logprobs([values])
        return values
