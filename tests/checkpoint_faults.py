"""Checkpoints whose writer is killed, or finds the disk full, at a random point; and what can be restored then.

The learners are real, and so is what writes: a fork of this process, with their state after the second step in memory
and the checkpoint of the first on disk.
"""

import asyncio
import gc
import os
import random
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from orchestrator.algorithms.ppo import PPO
from orchestrator.config.checkpoint import CheckpointConfig
from orchestrator.learners import CriticLearner
from orchestrator.loop.checkpoint import Checkpoints
from orchestrator.loop.checkpoint_folder import latest
from orchestrator.loop.state import TrainState
from orchestrator.policy.ranks import Policy
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution
from quartet.wire.errors import Internal
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests import disk_faults
from tests.learner_batches import CriticBatch, PolicyBatch, train_critic, train_policy
from tests.unit.rows import noise, pairs

POLICY, CRITIC = Policy.name, CriticLearner.name
KINDS = ("killed at an event", "killed at a moment", "full at an event", disk_faults.WITHIN)
CONFIG = CheckpointConfig(every=1, keep=1)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one trial."""

    kind: str
    died: bool
    """SIGKILL ended the writer."""
    noted: bool
    """The writer lived and said that the checkpoint failed."""
    step: int
    """Step of the checkpoint that was there afterwards, or 0 without one."""
    whole: bool
    """Both learners were restored from it bit for bit, and the next checkpoint left nothing but itself."""


def _state(step: int) -> TrainState:
    return TrainState(step=step, first_version=0, first_critic_step=0)


class _Part:
    """A learner as Checkpoints sees it. `taken` if its state is in memory already."""

    def __init__(self, trainer: PolicyTrainer | CriticTrainer, name: str, taken: bool) -> None:
        self._trainer, self.name, self._taken = trainer, name, taken

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        if not self._taken:
            self._trainer.learner.take_snapshot(checkpoint / self.name, step, copies=copies)

    async def write_snapshot(self, checkpoint: Path) -> None:
        try:
            await asyncio.to_thread(self._trainer.learner.write_snapshot)
        except Exception as error:  # as it arrives from a rank in another process
            raise Internal(f"{self.name}: {error}") from error


class Scene:
    """Learners after two steps, and the checkpoint of the first."""

    def __init__(self, folder: Path, policy: Path, reward: Path, seed: int) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._policy_model, self._reward_model = str(policy), str(reward)
        self._policy, self._critic = self._learners()
        self._weights: dict[int, Weights] = {}
        self._train(1)
        self._base = folder / "base"
        asyncio.run(self._next(self._base, 1))
        self._train(2)
        self._events, self._seconds = self._measured()
        """A letter for each file-system event of a checkpoint, and how long it takes."""

    def _learners(self) -> tuple[PolicyTrainer, CriticTrainer]:
        policy = PolicyConfig(model=self._policy_model, optimizer=OPTIMIZER)
        critic = CriticConfig(model=self._reward_model, optimizer=OPTIMIZER)
        algorithm = PPO(epochs=1, minibatch_size=5)
        return PolicyTrainer(policy, algorithm, Distribution(1.0)), CriticTrainer(critic)

    def _train(self, step: int) -> None:
        prompts, responses = pairs(5)
        rows, advantages = noise(responses, 1), noise(responses, 2)
        train_policy(self._policy, PolicyBatch(prompts, responses, rows, rows, rows, advantages, 0.0), seed=step)
        batch = CriticBatch(prompts, responses, values=rows, returns=advantages)
        train_critic(self._critic, batch, epochs=1, minibatch_size=5, seed=step)
        self._weights[step] = _weights(self._policy, self._critic)

    async def _next(self, folder: Path, step: int) -> None:
        """One more checkpoint, by a run that has just begun."""
        async with self._checkpoints(folder, taken=False) as checkpoints:
            await checkpoints.first(_state(step))

    def _checkpoints(self, folder: Path, *, taken: bool, note: Callable[[str], None] = print) -> Checkpoints:
        learners: list[Any] = [_Part(self._policy, POLICY, taken), _Part(self._critic, CRITIC, taken)]
        folder.mkdir(exist_ok=True)
        return Checkpoints(folder, CONFIG, learners, None, note)

    def _measured(self) -> tuple[bytes, float]:
        """The events of a checkpoint that nothing disturbs, a letter each, and the seconds it takes."""
        read, write = os.pipe()
        began = time.monotonic()
        status = self._written("measured", lambda folder: disk_faults.record(folder, write))
        seconds = time.monotonic() - began
        os.close(write)
        assert status == 0
        with os.fdopen(read, "rb") as pipe:
            return pipe.read(), seconds

    def _written(self, name: str, fault: Callable[[Path], None], killed_after_s: float | None = None) -> int:
        """Has a fork write the second step's checkpoint; its exit status, 1 if the checkpoint was given up."""
        folder = self._folder / name
        shutil.copytree(self._base, folder, dirs_exist_ok=True)
        aside = folder / ".step-000002.fork.writing"
        self._policy.learner.take_snapshot(aside / POLICY, 2)
        self._critic.learner.take_snapshot(aside / CRITIC, 2)
        child = os.fork()
        if not child:
            # What is garbage already stays: a group of gloo's would wait here for threads that a fork does not have.
            gc.freeze()
            os._exit(self._as_writer(folder, fault))
        if killed_after_s is not None:
            time.sleep(killed_after_s)
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]

    def _as_writer(self, folder: Path, fault: Callable[[Path], None]) -> int:
        notes: list[str] = []

        async def write() -> None:
            async with AsyncExitStack() as stack:
                checkpoints = self._checkpoints(folder, taken=True, note=notes.append)
                stack.push_async_exit(checkpoints)
                await checkpoints.take_if_due(_state(2))

        try:
            # Progress is shown under a lock of all forks, which one that is killed would keep from this process.
            transformers_logging.tqdm_lib.tqdm.set_lock(threading.RLock())
            secrets.token_hex = lambda length: "fork"  # type: ignore[assignment, misc]  # where the snapshots go
            fault(folder)
            asyncio.run(write())
            return 1 if notes else 0
        except BaseException:
            import traceback

            traceback.print_exc()
            return 2

    def trial(self, number: int, kind: str) -> Outcome:
        """One fault at a random point of the writing, and all that may follow it."""
        name = f"{number:03d}"
        folder, chance = self._folder / name, self._random
        if kind == "full disk":
            # Room for the checkpoint that is there, and for less than all of the next.
            sizes = disk_faults.sizes(self._base)
            with disk_faults.small_disk(folder, sum(sizes) + chance.randrange(sum(sizes))) as grow:
                return self._outcome(kind, folder, self._written(name, lambda folder: None), grow)
        if kind == "killed at a moment":
            status = self._killed(name, chance.uniform(0, self._seconds))
        else:
            at = chance.randrange(len(self._events))
            made = chance.randrange(self._events.count(disk_faults.MAKES))
            limit = chance.randrange(max(disk_faults.sizes(self._base)))
            faults: dict[str, Callable[[Path], None]] = {
                "killed at an event": lambda folder: disk_faults.kill(folder, at),
                "full at an event": lambda folder: disk_faults.fill(folder, made),
                "full within a file": lambda folder: disk_faults.limit_files(limit),
            }
            status = self._written(name, faults[kind])
        try:
            return self._outcome(kind, folder, status)
        finally:
            shutil.rmtree(folder)

    def _killed(self, name: str, after_s: float) -> int:
        """Kills the writer while it writes: sooner, if it was done by then."""
        while True:
            status = self._written(name, lambda folder: None, after_s)
            if os.WIFSIGNALED(status):
                return status
            shutil.rmtree(self._folder / name)
            after_s /= 2

    def _outcome(self, kind: str, folder: Path, status: int, grow: Callable[[], None] = lambda: None) -> Outcome:
        """Looks at what a writer left; `grow` makes room for another checkpoint."""
        last = latest(folder)
        whole = last is not None and self._restores(last.folder, last.state.step)
        grow()
        whole = whole and self._goes_on(folder)
        died, code = os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status)
        assert code in (0, 1, -signal.SIGKILL), code
        return Outcome(kind, died, code == 1, last.state.step if last else 0, whole)

    def _restores(self, folder: Path, step: int) -> bool:
        policy, critic = self._learners()
        if {policy.learner.restore(folder / POLICY), critic.learner.restore(folder / CRITIC)} != {step}:
            return False
        actual, wanted = _weights(policy, critic), self._weights[step]
        return actual.keys() == wanted.keys() and all(torch.equal(actual[name], wanted[name]) for name in wanted)

    def _goes_on(self, folder: Path) -> bool:
        asyncio.run(self._next(folder, 3))
        return [path.name for path in folder.iterdir()] == ["step-000003"]


def _weights(policy: PolicyTrainer, critic: CriticTrainer) -> Weights:
    return {
        f"{which}.{name}": tensor.detach().clone()
        for which, trainer in ((POLICY, policy), (CRITIC, critic))
        for name, tensor in trainer.learner.full_weights()
    }
