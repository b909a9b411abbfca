"""Checkpoints: whole or not there, the last few kept, written while training goes on."""

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pydantic import ValidationError

from orchestrator.config import CheckpointConfig
from orchestrator.journal import ExperienceJournal
from orchestrator.policy_actor import PolicyError
from orchestrator.state import TrainState
from services.common.config import ConfigError
from services.common.errors import ServiceError
from services.common.folders import make, remove, rename, write
from services.common.layout import LAYOUT
from services.critic.client import CriticReset

STATE = "state.json"
POLICY, CRITIC = "policy", "critic"
_PREFIX = "step-"


class Policy(Protocol):
    """The policy learner's part."""

    async def take_snapshot(self, folder: str, step: int, copies: bool) -> None:
        """Copies its state, and the model; without copies, writes them."""

    async def write_snapshot(self) -> None:
        """Brings the copies to disk."""


class Critic(Protocol):
    """The critic service's part."""

    async def take_checkpoint(self, path: str, last_step: int, timeout_s: float, *, copies: bool) -> None:
        """Copies its state, which must be that after `last_step`; without copies, writes it."""

    async def write_checkpoint(self, path: str, timeout_s: float) -> None:
        """Brings the copies to disk."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    state: TrainState


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in `folder`, or None.

    Raises:
        ConfigError: its state cannot be read.
    """
    if not (found := _all(folder)):
        return None
    path = found[-1] / STATE
    try:
        return Checkpoint(found[-1], TrainState.model_validate_json(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{path}: not what a checkpoint holds ({error}); remove {found[-1]} to resume from the one before"
        ) from None


def clear(folder: Path, *, overwrite: bool) -> None:
    """Makes room for a new run's checkpoints.

    Raises:
        ConfigError: there are some, and they are not to be overwritten.
    """
    if (found := _all(folder)) and not overwrite:
        raise ConfigError(f"{folder} already holds checkpoints; choose another name, --resume them, or --overwrite")
    for old in found:
        remove(old)


class Checkpoints:
    """Takes them. Open it as a context: leaving it waits for the one that is being written."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        policy: Policy,
        critic: Critic,
        journal: ExperienceJournal | None,
        note: Callable[[str], None],
    ) -> None:
        """`note` is told of a checkpoint that failed: training goes on without it."""
        self._folder = folder
        self._config = config
        self._policy = policy
        self._critic = critic
        self._journal = journal
        self._note = note
        self._writing: asyncio.Task[None] | None = None
        self._waited_s = 0.0

    async def first(self, state: TrainState) -> None:
        """The one to which a run can always go back. Returns when it is on disk.

        Raises:
            ServiceError: it failed.
        """
        if self._config.every:
            await self._take(state)
            await self._settled(required=True)

    async def after(self, state: TrainState) -> None:
        """Takes a checkpoint if one is due. Returns when all is copied; writing goes on beside.

        Raises:
            CriticReset, PolicyError: a learner is lost.
        """
        if not self._config.every or state.step % self._config.every:
            return
        began = time.monotonic()
        try:
            await self._settled()
            await self._take(state)
            if not self._config.background:
                await self._settled()
        except* (CriticReset, PolicyError):
            raise
        except* ServiceError as group:
            self._failed(group.exceptions[0])
        finally:
            self._waited_s += time.monotonic() - began

    def waited_s(self) -> float:
        """Seconds that training has waited for checkpoints since this was last asked."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    async def _take(self, state: TrainState) -> None:
        # A name of its own: a critic may still be writing what a killed run began.
        aside = self._folder / f".{_PREFIX}{state.step:06d}.{secrets.token_hex(4)}.writing"
        make(aside)
        timeout_s, copies = self._config.timeout_s, self._config.background
        with _gone_if_it_fails(aside):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._policy.take_snapshot(str(aside / POLICY), state.step, copies))
                group.create_task(
                    self._critic.take_checkpoint(str(aside / CRITIC), state.critic_step, timeout_s, copies=copies)
                )
        self._writing = asyncio.create_task(self._write(aside, state))

    async def _write(self, aside: Path, state: TrainState) -> None:
        with _gone_if_it_fails(aside):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._policy.write_snapshot())
                group.create_task(self._critic.write_checkpoint(str(aside / CRITIC), self._config.timeout_s))
            self._check_shared(aside)
            await asyncio.to_thread(self._complete, aside, state)

    def _check_shared(self, aside: Path) -> None:
        for part in (POLICY, CRITIC):
            if not (aside / part / LAYOUT).is_file():
                raise ServiceError(
                    f"the {part} wrote to {aside / part}, but nothing is there: checkpoint.folder must be on a disk "
                    "that all nodes share"
                )

    def _complete(self, aside: Path, state: TrainState) -> None:
        write(aside / STATE, state.model_dump_json(indent=1) + "\n")
        target = self._folder / f"{_PREFIX}{state.step:06d}"
        remove(target)
        rename(aside, target)
        kept = _all(self._folder)[-self._config.keep :]
        for old in _all(self._folder)[: -self._config.keep]:
            # Renamed first: a folder that is half removed must not look like a checkpoint.
            rename(old, gone := old.with_name(f".{old.name}.removing"))
            remove(gone)
        if self._journal:
            self._journal.forget(_step(kept[0]))

    async def _settled(self, required: bool = False) -> None:
        """Waits for the checkpoint that is being written, if one is."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await writing
        except* (ServiceError, PolicyError, OSError) as group:
            if required:
                raise
            self._failed(group.exceptions[0])

    def _failed(self, error: BaseException) -> None:
        last = latest(self._folder)
        self._note(f"checkpoint failed: {error}; the last one is of step {last.state.step if last else 'none'}")

    async def __aenter__(self) -> Self:
        """Also removes what a run that was killed left half written."""
        for left in [*self._folder.glob(".*.writing"), *self._folder.glob(".*.removing")]:
            shutil.rmtree(left, ignore_errors=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind and self._writing:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        else:
            await self._settled()


@contextmanager
def _gone_if_it_fails(aside: Path) -> Iterator[None]:
    """What is no checkpoint takes no room, which may be what was missing."""
    try:
        yield
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _all(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = (path.parent for path in folder.glob(f"{_PREFIX}*/{STATE}"))
    return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdecimal()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))
