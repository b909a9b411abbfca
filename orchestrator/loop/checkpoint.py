"""Takes checkpoints: complete or not at all, the last few kept, written while training continues."""

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

from orchestrator.config.checkpoint import SnapshotsConfig
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.learners import LOSSES, Snapshotted
from orchestrator.loop.checkpoint_folder import PREFIX, STATE, complete, number
from quartet.config.base import MIB
from quartet.folders import make, remove, rename, write
from quartet.learner.layout import LAYOUT
from quartet.threads import in_thread
from quartet.wire.errors import NotFinite, ServiceError, leaves


class LoopState(Protocol):
    """The state of a loop between two steps."""

    @property
    def step(self) -> int:
        """Number of steps done."""

    @property
    def skipped_in_a_row(self) -> int:
        """Consecutive optimizer steps up to now whose gradient was not finite."""

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """The state as JSON, as pydantic writes it."""


def end_if_stuck(state: LoopState, config: SnapshotsConfig, last_step: Callable[[], int | None]) -> None:
    """Raises NotFinite after too many steps in a row that changed nothing; `last_step` is the last checkpoint's."""
    if state.skipped_in_a_row < config.max_skipped_steps:
        return
    advice = "There is no checkpoint"
    if (last := last_step()) is not None:
        advice = f"The last good checkpoint is of step {last}; --resume goes on from there, "
        advice += "for instance with a lower learning rate"
    raise NotFinite(
        f"step {state.step}: {state.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite "
        f"(checkpoint.max_skipped_steps: {config.max_skipped_steps}). {advice}"
    )


class Checkpoints:
    """Takes checkpoints. As a context, it waits at its end for the checkpoint that is being written."""

    def __init__(
        self,
        folder: Path,
        config: SnapshotsConfig,
        learners: Sequence[Snapshotted],
        journal: ExperienceJournal | None,
        note: Callable[[str], None],
    ) -> None:
        """`note` gets a message if a checkpoint of the learners fails; training continues without it."""
        self._folder = folder
        self._config = config
        self._learners = learners
        self._journal = journal
        self._note = note
        self._writing: asyncio.Task[None] | None = None
        self._waited_s = 0.0
        self._due = False

    def last_step(self) -> int | None:
        """Step of the last checkpoint on disk, if there is one."""
        checkpoints = complete(self._folder)
        return number(checkpoints[-1]) if checkpoints else None

    async def first(self, state: LoopState) -> None:
        """Takes the first checkpoint, to which a run can always return. Returns when it is on disk.

        Raises:
            ServiceError: the checkpoint failed.
        """
        if self._config.every:
            await self._take(state)
            await self._settled(required=True)

    async def take_if_due(self, state: LoopState, *, last: bool = False) -> None:
        """Takes a checkpoint if one is due, as it is after the `last` step of a run that wants it. Returns when all
        state is copied; writing continues in the background.

        While optimizer steps are skipped because their gradient is not finite, none is taken, so that the last good
        one is kept; the one that is due is taken after the next good step.

        Raises:
            Errors of LOSSES: a learner is lost.
        """
        self._due = self._due or (self._config.every > 0 and (last or state.step % self._config.every == 0))
        if not self._due or state.skipped_in_a_row:
            return
        self._due = False
        began = time.monotonic()
        try:
            await self._settled()
            await self._take(state)
            if not self._config.background:
                await self._settled()
        except* LOSSES:
            raise
        except* ServiceError as group:
            self._failed(group.exceptions[0])
        finally:
            self._waited_s += time.monotonic() - began

    def waited_s(self) -> float:
        """Seconds that training has waited for checkpoints since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    async def _take(self, state: LoopState) -> None:
        # A new name, because a critic may still be writing a killed run's checkpoint.
        aside = self._folder / f".{PREFIX}{state.step:06d}.{secrets.token_hex(4)}.writing"
        make(aside)
        with _gone_if_it_fails(aside):
            async with asyncio.TaskGroup() as group:
                for learner in self._learners:
                    group.create_task(learner.take_snapshot(aside, state.step, copies=self._config.background))
        self._writing = asyncio.create_task(self._write(aside, state))

    async def _write(self, aside: Path, state: LoopState) -> None:
        with _gone_if_it_fails(aside):
            async with asyncio.TaskGroup() as group:
                for learner in self._learners:
                    group.create_task(learner.write_snapshot(aside))
            self._check_shared(aside)
        # A thread goes on when its task is cancelled. So the end of this task waits for it in any case: nothing is
        # removed from a folder that is about to become the checkpoint, nor read while others are removed. No pool's
        # thread: pools take no work at the end of a program, which waits for a run that was not closed.
        completing = asyncio.ensure_future(in_thread(lambda: self._complete(aside, state), "checkpoint"))
        try:
            await asyncio.shield(completing)
        except asyncio.CancelledError:
            await asyncio.wait([completing])
            raise

    def _check_shared(self, aside: Path) -> None:
        for name in (learner.name for learner in self._learners):
            if not (aside / name / LAYOUT).is_file():
                raise ServiceError(
                    f"the {name} wrote to {aside / name}, but nothing is there: checkpoint.root, and the root of a "
                    "critic, must be one folder, on a disk that all nodes share"
                )

    def _complete(self, aside: Path, state: LoopState) -> None:
        with _gone_if_it_fails(aside):
            write(aside / STATE, state.model_dump_json(indent=1) + "\n")
            target = self._folder / f"{PREFIX}{state.step:06d}"
            remove(target)
            rename(aside, target)
        kept = complete(self._folder)[-self._config.keep :]
        for old in complete(self._folder)[: -self._config.keep]:
            # Renamed first, so that a half-removed folder does not look like a checkpoint.
            rename(old, gone := old.with_name(f".{old.name}.removing"))
            remove(gone)
        if self._journal:
            self._journal.forget(number(kept[0]))

    async def _settled(self, required: bool = False) -> None:
        """Waits for the checkpoint that is being written, if any."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await writing
        except* (ServiceError, *LOSSES, OSError) as group:
            if required:
                raise
            self._failed(group.exceptions[0])

    def _failed(self, error: BaseException) -> None:
        last = self.last_step()
        kept = "there is none yet" if last is None else f"the last one is of step {last}"
        self._note(f"checkpoint failed: {error}; {kept}")

    async def __aenter__(self) -> Self:
        """Removes incomplete folders of a killed run."""
        for left in [*self._folder.glob(".*.writing"), *self._folder.glob(".*.removing")]:
            shutil.rmtree(left, ignore_errors=True)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind and self._writing:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        else:
            await self._settled()


@contextmanager
def _gone_if_it_fails(aside: Path) -> Iterator[None]:
    """Deletes the partial checkpoint if the block fails: the disk may be full.

    Raises:
        ServiceError: it is, of which torch says nothing when it writes. Other failures stay as they are.
    """
    try:
        yield
    except BaseException as error:
        full = shutil.disk_usage(aside.parent).free < MIB
        shutil.rmtree(aside, ignore_errors=True)
        found = leaves(error)
        if full and all(isinstance(each, ServiceError | OSError) and not isinstance(each, LOSSES) for each in found):
            raise ServiceError(f"no space is left on the disk of {aside.parent}: {found[0]}") from error
        raise
