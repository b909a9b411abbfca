"""Putting a run together: the loop's collaborators, made from the configuration, and made anew after each loss."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from orchestrator.admission import admissions, registered
from orchestrator.checkpoint import CRITIC, POLICY, Checkpoint, Checkpoints, clear, latest
from orchestrator.cluster import running
from orchestrator.config import OrchestratorConfig
from orchestrator.data import PromptStream
from orchestrator.deployment import Deployment
from orchestrator.evaluation import Evaluator
from orchestrator.experience import Collector
from orchestrator.journal import ExperienceJournal
from orchestrator.metrics import CHECKPOINTS, FILE, JOURNAL, MetricsLog, read_metrics
from orchestrator.policy_actor import Policy, PolicyError
from orchestrator.preflight import Inputs, evaluation_prompts, preflight
from orchestrator.progress import Progress
from orchestrator.run_folder import differences, locked
from orchestrator.services import Infos, Services, check_compatible
from orchestrator.state import TrainState
from orchestrator.trainer import Trainer
from orchestrator.weights import WeightPusher
from services.common.config import ConfigError, read_yaml
from services.common.errors import DeadlineExceeded, InvalidArgument, Unavailable, leaves
from services.critic.client import CriticReset

RUNS = Path("runs")


@contextmanager
def connected_ray() -> Iterator[None]:
    """Joined to the cluster of RAY_ADDRESS, or the one that this folder's `quartet up` started.

    Raises:
        ConfigError: there is neither.
    """
    cluster = running()
    address = os.environ.get("RAY_ADDRESS") or (cluster.address if cluster else None)
    if address is None:
        raise ConfigError("no Ray cluster: run `quartet up` here first, or set RAY_ADDRESS")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


async def train(deployment: Deployment, progress: Progress, *, overwrite: bool = False, resume: bool = False) -> Path:
    """One PPO run, start to end; the run's folder.

    Everything that can be wrong with the input is found before the policy learner starts.

    Args:
        deployment: the configuration.
        progress: told of each step.
        overwrite: replace an earlier run of the same name.
        resume: go on with it, from its last checkpoint.

    Raises:
        ConfigError: the configuration, the data or the services do not fit together.
        ServiceError, PolicyError: a service or the learner failed beyond what is repeated.
    """
    config = deployment.orchestrator
    inputs = preflight(deployment)
    services = Services.connect(config.target)
    run_dir = RUNS / config.name
    try:
        await services.reach(config.target, deployment.path, config.timeouts.info_s)
        infos = await services.infos(config.timeouts.info_s)
        check_compatible(infos, inputs.tokenizer, config)
        with locked(run_dir), connected_ray():
            # Before anything is restored: another run may be using these services.
            async with registered(services.rollout.application) as registry:
                run = Run(deployment, inputs, services, progress, run_dir, registry)
                await run.finish(overwrite=overwrite, resume=resume)
    finally:
        await services.close()
    return run_dir


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same however often the learners are lost."""

    deployment: Deployment
    inputs: Inputs
    services: Services
    progress: Progress
    run_dir: Path
    registry: Any
    """Where new rollout replicas wait for this run's weights."""

    async def finish(self, *, overwrite: bool, resume: bool) -> None:
        """Trains to the end, from the last checkpoint whenever a learner is lost or a service away too long."""
        restarts = Restarts(self._config.checkpoint.restarts)
        if not resume:
            clear(self._checkpoints, overwrite=overwrite)
        checkpoint = self._to_resume() if resume else None
        for note in self.inputs.notes:
            self.progress.note(note)
        while True:
            try:
                await self._train(checkpoint, overwrite=overwrite, resume=resume)
                return
            except Exception as error:
                checkpoint = latest(self._checkpoints)
                if not checkpoint or not is_loss(error) or not restarts.spend(checkpoint.state.step):
                    raise
                reason = "; ".join(dict.fromkeys(str(leaf) for leaf in leaves(error)))
                self.progress.note(f"interrupted ({reason}); going on from step {checkpoint.state.step}")
                resume = True

    @property
    def _config(self) -> OrchestratorConfig:
        return self.deployment.orchestrator

    @property
    def _checkpoints(self) -> Path:
        """Absolute: learners have working directories of their own."""
        return Path(self._config.checkpoint.folder or self.run_dir / CHECKPOINTS).resolve()

    def _to_resume(self) -> Checkpoint | None:
        """The last checkpoint, if there is one; says what will happen."""
        checkpoint, steps = latest(self._checkpoints), self._config.steps
        if checkpoint is None and any(line["step"] > 0 for line in self._measured()):
            raise ConfigError(
                f"{self.run_dir} was trained, but {self._checkpoints} holds no checkpoint: was checkpoint.every 0, "
                "or checkpoint.folder another? --overwrite begins anew"
            )
        if checkpoint is None:
            self.progress.note(f"{self.run_dir} has no checkpoint yet: beginning at step 1")
            return None
        if checkpoint.state.step > steps:
            raise ConfigError(
                f"orchestrator.steps: {steps}, but the last checkpoint is of step {checkpoint.state.step}"
            )
        self.progress.note(f"resuming {self.run_dir} after step {checkpoint.state.step} of {steps}")
        kept = self.run_dir / "config.yaml"
        for line in differences(read_yaml(kept), self.deployment.raw) if kept.exists() else []:
            self.progress.note(line)
        return checkpoint

    def _measured(self) -> list[dict[str, float]]:
        metrics = self.run_dir / FILE
        return read_metrics(metrics) if metrics.exists() else []

    async def _train(self, checkpoint: Checkpoint | None, *, overwrite: bool, resume: bool) -> None:
        """From a checkpoint, or from the start."""
        config, services, run_dir = self._config, self.services, self.run_dir
        # Longer than when the run began: a service that is being replaced loads its model first.
        infos = await services.infos(config.timeouts.start_s)
        state = checkpoint.state if checkpoint else self._start(infos)
        after = state.step if checkpoint else -1 if resume else None
        with MetricsLog.open(
            run_dir, config.log, self.deployment.raw, overwrite=overwrite, resume_after=after
        ) as log:
            policy = await Policy.start(config)
            try:
                if checkpoint:
                    await self._restore(policy, checkpoint)
                pusher = WeightPusher(services.rollout, policy, infos.rollout.weight_backend, config.weights)
                journal = (
                    ExperienceJournal(run_dir / JOURNAL, config, self.progress.note)
                    if config.checkpoint.journal
                    else None
                )
                taken = Checkpoints(
                    self._checkpoints, config.checkpoint, policy, services.critic, journal, self.progress.note
                )
                prompts = PromptStream(self.inputs.train.prompts, config.batch_size, config.seed)
                trainer = Trainer(
                    config, services, policy, pusher, prompts, journal, taken, self._evaluator(), log, self.progress
                )
                async with admissions(pusher, self.registry), taken:
                    save_to = Path(config.save or run_dir / "policy").resolve()
                    await trainer.run(state, save_to, resumed=checkpoint is not None)
            finally:
                await policy.close()

    def _start(self, infos: Infos) -> TrainState:
        """Of a run that begins with whatever the services have done before."""
        if infos.critic.last_step:
            self.progress.note(
                f"the critic was trained for {infos.critic.last_step} steps before; "
                "for a fresh one, `quartet down` and `quartet up`"
            )
        return TrainState(
            step=0,
            policy_version=infos.rollout.policy_version + 1,
            critic_step=infos.critic.last_step,
            kl_coef=self._config.ppo.kl.coef,
        )

    async def _restore(self, policy: Policy, checkpoint: Checkpoint) -> None:
        """Both learners to the checkpoint, the critic's service whatever it has trained since."""
        timeout_s = self._config.checkpoint.timeout_s
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(policy.restore(str(checkpoint.folder / POLICY)))
                group.create_task(self.services.critic.restore_checkpoint(str(checkpoint.folder / CRITIC), timeout_s))
        except* InvalidArgument as group_:
            reason = "; ".join(str(leaf) for leaf in leaves(group_))
            raise ConfigError(
                f"{checkpoint.folder} cannot be restored: {reason}. "
                "If it is broken, remove it to resume from the one before"
            ) from None

    def _evaluator(self) -> Evaluator | None:
        config, inputs = self._config, self.inputs
        if inputs.held_out is None:
            return None
        return Evaluator(
            Collector(self.services, config),
            evaluation_prompts(inputs.held_out, config),
            inputs.tokenizer,
            inputs.judges,
            self.run_dir / "evaluations",
            config.evaluation.samples_per_prompt,
        )


class Restarts:
    """How often a run may yet go back."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed
        self._step = -1

    def spend(self, step: int) -> bool:
        """Whether it may go back to `step` once more. One that has got further may again as often as at first."""
        if step > self._step:
            self._step, self._left = step, self._allowed
        self._left -= 1
        return self._left >= 0


def is_loss(error: BaseException) -> bool:
    """A part of the run is gone or was away for too long: something that is mended by waiting for it, or replacing
    it, and going on from a checkpoint. What is wrong with the input is not."""
    losses = (PolicyError, CriticReset, Unavailable, DeadlineExceeded)
    return any(isinstance(leaf, losses) for leaf in leaves(error))
