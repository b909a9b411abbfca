"""The stream of experience: samples are made without a pause, and batches are formed of what is finished."""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np

from orchestrator.algorithms.contract import Group
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.beside import Beside
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected, Finished, Row, Scored, score_column
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import Used, calls, training_requests
from orchestrator.experience.slots import Slots
from quartet.threads import in_thread
from quartet.wire.codec import Floats
from quartet.wire.errors import DeadlineExceeded

log = logging.getLogger("quartet")

LATE_S, LATE = 30.0, 3
"""A wait for a batch is told to the user after so many seconds, or so many times the last wait if that is longer."""


class DiscardedError(RuntimeError):
    """The algorithm discards nearly all groups, so that a batch would not come."""


class Stream:
    """Makes the services sample whenever Slots has room, and gives each step a batch of what is finished.

    Samples are asked for in the order of their numbers, in calls of prompts_per_call; each is scored and referenced
    as soon as it has come. All responses to one prompt are in one batch, or discarded together when the last is
    finished, if the algorithm does not admit them or one of them has no score; another prompt takes their place. The
    loop, for each step:

        collected = await stream.take(8, critic_step=7)                   # samples 0 1 3 5, say; 2 4 6 7 go on
        collected = await stream.complete(8, collected, critic_step=7)    # values, journal
        stream.served(9)                                                  # version 9 is pushed: room for 8 to 11

    With max_staleness 0 a batch is asked for when the loop waits for it, and is valued as it is scored: lock-step.
    With more, the critic trains in between, so that its values are asked for when a batch is taken.

    At lock-step it does not depend on the order in which samples finish which groups a batch takes: the first in
    number that are admitted, since as many are asked for as the batch lacks, and no more.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        prompts: PromptStream,
        collector: Collector,
        journal: ExperienceJournal | None,
        beside: Beside,
        *,
        step: int,
        version: int,
        used: Used,
    ) -> None:
        """Opens the stream of the steps after `step`: at a run's start, or at a checkpoint.

        The steps that follow and are in the journal come from there: nothing of them is sampled again, and they are
        trained on by the versions that they were taken for, so that their samples are as old as they were. The
        stream holds them in memory until then.

        Args:
            config: size of batches, how much is sampled ahead, and number of steps.
            prompts: the stream of prompts.
            collector: samples and scores.
            journal: keeps the batches that were taken; None for no journal.
            beside: runs the sampling. A failure of a service ends its block at once.
            step: steps done.
            version: version that the replicas serve, and that trains on the next batch.
            used: samples trained on or discarded.
        """
        self._config = config
        self._prompts = prompts
        self._collector = collector
        self._journal = journal
        self._beside = beside
        self._each = config.algorithm.samples_per_prompt
        self._kept = self._in_journal(step, used)
        """Step -> its batch, of those that come from the journal."""
        reserved = {number for batch in self._kept.values() for number in batch.numbers}
        self._numbers = used.others(reserved)
        self._slots = Slots(
            config.batch_size // self._each,
            staleness=config.loop.max_staleness,
            depth=config.loop.ahead,
            version=version,
            last=version + config.steps - step - 1,
            kept=len(self._kept),
        )
        self._finished: dict[int, list[Row]] = {}
        self._repeated = 0
        self._critic_step: int | None = None
        self._next_step = step + len(self._kept) + 1
        """The step of the next batch that is not kept."""
        self._discarded: list[Scored] = []
        """The samples that were discarded since the last batch was taken."""
        self._refused = self._dropped = 0
        """Their groups that the algorithm did not admit, and those of which a response has no score."""
        self._changed = asyncio.Event()
        self._waited_s = 0.0
        """Duration of the last wait for a batch."""

    def _in_journal(self, step: int, used: Used) -> dict[int, Collected]:
        """The batches of the steps after `step` up to the first that the journal does not hold."""
        kept: dict[int, Collected] = {}
        while self._journal and (batch := self._journal.read(step + 1, self._prompts.dealt)):
            numbers = batch.numbers
            if any(number in used for number in numbers):
                break  # of an abandoned timeline
            step, used = step + 1, used.plus(numbers)
            kept[step] = batch
        return kept

    async def take(self, step: int, *, critic_step: int | None) -> Collected:
        """The experience of PPO step `step`, the one after that of the last call; with values at lock-step only.

        Waits for the services. `critic_step` is the critic's last step; None for a run without a critic.

        Raises:
            DeadlineExceeded: no batch is complete after timeouts.take_s; the message says what it waits for.
            DiscardedError: too many groups were discarded.
        """
        self._slots.wait()
        self._critic_step = critic_step if self._config.loop.max_staleness == 0 else None
        self._admit()
        if kept := self._kept.pop(step, None):
            self._slots.take_kept()
            batch = replace(kept, kept=True)
        else:
            groups = await self._chosen(step)
            self._slots.take(groups)
            finished = [each for group in groups for each in self._finished.pop(group)]
            batch = Collected.of(finished, self._repeated, self._discarded).scored_by(self._config.algorithm, step)
            if self._repeated:
                log.info(
                    "step %d: %d requests for samples were repeated, as a replica was lost", step, self._repeated
                )
            self._next_step, self._repeated, self._discarded = step + 1, 0, []
            self._refused = self._dropped = 0
        self._critic_step = None
        self._admit()
        return batch

    async def complete(self, step: int, collected: Collected, *, critic_step: int | None) -> Collected:
        """The batch of `step`, with the values of the critic after `critic_step`; writes it to the journal."""
        if collected.kept:
            return collected
        if critic_step is not None and "values" not in collected.columns:
            collected = await self._collector.value(collected, critic_step)
        if self._journal:
            journal = self._journal
            await in_thread(lambda: journal.write(step, collected), "journal")
        return collected

    def served(self, version: int) -> None:
        """Records that all replicas serve `version`; asks for the samples that have room now."""
        self._slots.commit(version)
        self._admit()

    def _admit(self) -> None:
        """Starts the samples for which there is room; with values by the critic if the loop waits at lock-step."""
        if self._excess():
            return
        version, numbers = self._slots.served, list(islice(self._numbers, self._slots.free() * self._each))
        for start in range(0, len(numbers), self._each):
            group = numbers[start]
            self._slots.admit(group)
            self._finished[group] = []
        asked = training_requests(self._config, self._prompts, numbers)
        for requests in calls(asked, self._config.prompts_per_call):
            call = self._collector.finish(
                requests, version=version, critic_step=self._critic_step, put=self._put, on_repeat=self._repeat
            )
            self._beside.start(call, f"sampling of {requests[0].number} to {requests[-1].number}")

    def _put(self, finished: Finished) -> None:
        for index, group in enumerate(finished.columns["group"].tolist()):
            self._finished[group].append((finished, index))
            if len(self._finished[group]) == self._each:
                self._whole(group)

    def _whole(self, group: int) -> None:
        """Keeps a group of which all samples are finished, or discards it."""
        self._slots.finish(group)
        algorithm, rows = self._config.algorithm, sorted(self._finished[group], key=_number)
        scores = {name: _scores(rows, name) for name in algorithm.score_names}
        dropped = any(bool(np.isnan(each).any()) for each in scores.values())
        if dropped or (algorithm.discard_limit and not algorithm.admit(_group(rows, scores))):
            self._dropped += dropped
            self._refused += not dropped
            self._slots.discard(group)
            totals = algorithm.score(scores, self._next_step).tolist()
            self._discarded += (
                Scored(_number(row), int(row[0].columns["row"][row[1]]), total)
                for row, total in zip(rows, totals, strict=True)
            )
            del self._finished[group]
            self._admit()
        self._changed.set()

    def _repeat(self, missing: int) -> None:
        self._repeated += missing

    async def _chosen(self, step: int) -> list[int]:
        longest_s = self._config.longest_take_s
        try:
            async with asyncio.timeout(longest_s):
                with self._telling_of_a_long_wait(step):
                    return await self._complete_groups(step)
        except TimeoutError:
            raise DeadlineExceeded(
                f"step {step}: no batch after {longest_s:g} s (timeouts.take_s). {self._collector.stages}; the "
                f"replicas serve version {self._slots.served}, version {self._slots.next_take} trains next"
            ) from None

    async def _complete_groups(self, step: int) -> list[int]:
        while (groups := self._slots.choose()) is None:
            if excess := self._excess():
                raise DiscardedError(f"step {step}: {excess}, and go on with --resume")
            self._changed.clear()
            await self._changed.wait()
        return groups

    @contextmanager
    def _telling_of_a_long_wait(self, step: int) -> Iterator[None]:
        """Context of a wait for a batch: if it is longer than usual the user hears where the samples are, again after
        twice the time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        timer: asyncio.TimerHandle

        def tell(seconds: float) -> None:
            nonlocal timer
            self._collector.note(f"step {step} has waited {seconds:.0f} s for samples. {self._collector.stages}")
            timer = loop.call_at(began + 2 * seconds, tell, 2 * seconds)

        first = max(LATE_S, LATE * self._waited_s)
        timer = loop.call_at(began + first, tell, first)
        try:
            yield
        finally:
            timer.cancel()
            self._waited_s = loop.time() - began

    def _excess(self) -> str:
        """The reason why no more groups may be asked for in place of those that were discarded, and what to do; empty
        if they may."""
        config = self._config
        size, most = config.batch_size // self._each, config.unscored.max_dropped
        if self._dropped >= most * size:
            unscored = sum(math.isnan(each.score) for each in self._discarded)
            return (
                f"{self._dropped} groups of responses were discarded as {unscored} responses have no score, {most} "
                "for each one of a batch (unscored.max_dropped): mend the scorer"
            )
        most = config.algorithm.discard_limit
        if self._refused >= most * size > 0:
            return (
                f"{self._refused} groups of responses were discarded, {most} for each one of a batch "
                "(algorithm.max_discarded), and the batch is not complete: choose prompts of which the algorithm "
                "admits more, or let it discard none"
            )
        return ""


def _number(row: Row) -> int:
    finished, index = row
    return int(finished.columns["number"][index])


def _scores(rows: Sequence[Row], name: str) -> Floats:
    """The scores of this name, [G], NaN where there is none."""
    column = score_column(name)
    return np.asarray([finished.columns[column][index] for finished, index in rows], np.float32)


def _group(rows: Sequence[Row], scores: Mapping[str, Floats]) -> Group:
    """The group as the algorithm decides on it."""
    return Group(
        scores=scores,
        lengths=np.asarray([finished.columns.counts[index] for finished, index in rows], np.int64),
        truncated=np.asarray([finished.columns["truncated"][index] for finished, index in rows], bool),
    )
