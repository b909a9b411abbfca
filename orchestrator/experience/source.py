"""The source of the loop's experience: the services, or the journal for steps that were sampled before."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.collector import Collected, Collector
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import training_requests


@dataclass(frozen=True, slots=True)
class _Batch:
    collected: Collected
    kept: bool
    """True if it was read from the journal, and need not be written again."""


class ExperienceSource:
    """Makes the services sample each step's batch and returns it complete; the same batch after a restart.

    With `ahead` > 0 the batches of the next steps are sampled and scored while the loop trains on this one. A batch
    is admitted when the batch `ahead` steps before it is taken, and by no older version than the loop has then:

        ahead 1:  take(5) at version 4   admits batch 6, sampled by versions 4 and 5
                  take(6) at version 5   trains on it: at most one version behind

    So no token is more than `ahead` versions behind the policy that trains on it, however long sampling took, and
    nothing is discarded to keep it so: admission waits instead.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        prompts: PromptStream,
        collector: Collector,
        journal: ExperienceJournal | None,
    ) -> None:
        """
        Args:
            config: size of batches, number of batches sampled ahead, and number of steps.
            prompts: the stream of prompts.
            collector: samples and scores batches.
            journal: keeps the batches that were taken; None for no journal.
        """
        self._config = config
        self._prompts = prompts
        self._collector = collector
        self._journal = journal
        self._admitted: dict[int, asyncio.Task[_Batch]] = {}

    async def take(self, step: int, *, first: int, version: int, critic_step: int | None) -> Collected:
        """The experience of PPO step `step`, for training policy `version` with the critic after `critic_step`; None
        for a run without a critic.

        Its samples are those numbered from `first` on; the steps that follow have the numbers that follow.

        A run that goes back to a checkpoint and comes to a step for the second time gets what the journal kept.
        Values are always those of the critic as it is when the batch is taken. Waits for the services and raises
        what they raise; a failure while a batch is sampled ahead is raised when that batch is taken.
        """
        self._admit(step, first, version, critic_step)
        for later in range(step + 1, min(step + self._config.loop.ahead, self._config.steps) + 1):
            self._admit(later, first + (later - step) * self._config.batch_size, version, None)
        batch = await self._admitted.pop(step)
        if batch.kept:
            return batch.collected
        collected = batch.collected
        if critic_step is not None and not collected.valued:
            collected = await self._collector.value(collected, critic_step)
        if self._journal:
            await asyncio.to_thread(self._journal.write, step, collected)
        return collected

    def _admit(self, step: int, first: int, version: int, critic_step: int | None) -> None:
        """Starts the batch of `step`, unless it has been: sampled by `version` and those that are pushed meanwhile.

        Without `critic_step` its values are left for later: the critic trains before the batch is taken.
        """
        if step not in self._admitted:
            sampled = self._sampled(step, first, version, critic_step)
            self._admitted[step] = asyncio.create_task(sampled, name=f"sampling of step {step}")

    async def _sampled(self, step: int, first: int, version: int, critic_step: int | None) -> _Batch:
        if self._journal and (kept := self._journal.read(step, lambda number: self._prompts.dealt(number, 1)[0])):
            return _Batch(kept, kept=True)
        requests = training_requests(self._config, self._prompts, first, self._config.batch_size)
        collected = await self._collector.collect(requests, version=version, critic_step=critic_step)
        return _Batch(collected, kept=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what is sampled ahead; the engines drop its requests."""
        tasks = list(self._admitted.values())
        self._admitted.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
