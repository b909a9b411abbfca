"""The stream of experience: samples are made without a pause, and batches are formed of what is finished."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.beside import Beside
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected, Finished
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import Used, calls, training_requests
from orchestrator.experience.slots import Slots
from quartet.wire.errors import DeadlineExceeded


class Stream:
    """Makes the services sample whenever Slots has room, and gives each step a batch of what is finished.

    Samples are asked for in the order of their numbers, in calls of prompts_per_call; each is scored and referenced
    as soon as it has come. All responses to one prompt are in one batch. The loop, for each step:

        collected = await stream.take(8, critic_step=7)                   # samples 0 1 3 5, say; 2 4 6 7 go on
        collected = await stream.complete(8, collected, critic_step=7)    # values, journal
        stream.served(9)                                                  # version 9 is pushed: room for 8 to 11

    With max_staleness 0 a batch is asked for when the loop waits for it, and is valued as it is scored: lock-step.
    With more, the critic trains in between, so that its values are asked for when a batch is taken.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        prompts: PromptStream,
        collector: Collector,
        journal: ExperienceJournal | None,
        beside: Beside,
        slots: Slots,
        used: Used,
        kept: Mapping[int, Collected],
    ) -> None:
        """`kept` holds batches of the next steps; other arguments as of ExperienceSource."""
        self._config = config
        self._prompts = prompts
        self._collector = collector
        self._journal = journal
        self._beside = beside
        self._slots = slots
        self._kept = dict(kept)
        self._each = config.ppo.samples_per_prompt
        reserved = {experience.number for batch in kept.values() for experience in batch.experiences}
        self._numbers = used.others(reserved)
        self._group_of: dict[int, int] = {}
        self._finished: dict[int, list[Finished]] = {}
        self._repeated = 0
        self._changed = asyncio.Event()

    async def take(self, step: int, *, critic_step: int | None) -> Collected:
        """The experience of PPO step `step`, the one after that of the last call; with values at lock-step only.

        Waits for the services. `critic_step` is the critic's last step; None for a run without a critic.

        Raises:
            DeadlineExceeded: no batch is complete after timeouts.take_s; the message says what it waits for.
        """
        self._slots.wait()
        self._admit(critic_step if self._config.loop.max_staleness == 0 else None)
        if kept := self._kept.pop(step, None):
            self._slots.take_kept()
            batch = replace(kept, kept=True)
        else:
            groups = await self._chosen(step)
            self._slots.take(groups)
            repeated, self._repeated = self._repeated, 0
            batch = Collected.of([each for group in groups for each in self._finished.pop(group)], repeated)
        self._admit(None)
        return batch

    async def complete(self, step: int, collected: Collected, *, critic_step: int | None) -> Collected:
        """The batch of `step`, with the values of the critic after `critic_step`; writes it to the journal."""
        if collected.kept:
            return collected
        if critic_step is not None and not collected.valued:
            collected = await self._collector.value(collected, critic_step)
        if self._journal:
            await asyncio.to_thread(self._journal.write, step, collected)
        return collected

    def served(self, version: int) -> None:
        """Records that all replicas serve `version`; asks for the samples that have room now."""
        self._slots.commit(version)
        self._admit(None)

    def _admit(self, critic_step: int | None) -> None:
        """Starts the samples for which there is room. Without `critic_step` their values are left for later."""
        version, numbers = self._slots.served, list(islice(self._numbers, self._slots.free() * self._each))
        for start in range(0, len(numbers), self._each):
            group = numbers[start]
            self._slots.admit(group)
            self._finished[group] = []
            self._group_of |= dict.fromkeys(numbers[start : start + self._each], group)
        asked = training_requests(self._config, self._prompts, numbers)
        for requests in calls(asked, self._config.prompts_per_call):
            call = self._collector.finish(
                requests, version=version, critic_step=critic_step, put=self._put, on_repeat=self._repeat
            )
            self._beside.start(call, f"sampling of {requests[0].number} to {requests[-1].number}")

    def _put(self, finished: Finished) -> None:
        group = self._group_of.pop(finished.experience.number)
        self._finished[group].append(finished)
        if len(self._finished[group]) == self._each:
            self._slots.finish(group)
            self._changed.set()

    def _repeat(self, missing: int) -> None:
        self._repeated += missing

    async def _chosen(self, step: int) -> list[int]:
        longest_s = self._config.longest_take_s
        try:
            async with asyncio.timeout(longest_s):
                while (groups := self._slots.choose()) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return groups
        except TimeoutError:
            raise DeadlineExceeded(
                f"step {step}: no batch after {longest_s:g} s (timeouts.take_s). {self._collector.stages}; the "
                f"replicas serve version {self._slots.served}, version {self._slots.next_take} trains next"
            ) from None
