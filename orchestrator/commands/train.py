"""Builds a run: makes the loop's collaborators from the configuration, and makes them again after each loss."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray

from orchestrator.clients import Services, agreed_backend, check_compatible, targets_of
from orchestrator.commands.beginning import first_state, restore, resumed_state, to_resume
from orchestrator.commands.checks.agents import await_door, sessions_of
from orchestrator.commands.checks.outdated import outdated
from orchestrator.commands.checks.preflight import Inputs, evaluation_prompts, preflight
from orchestrator.commands.checks.startable import decided_here
from orchestrator.commands.halted import ending_halted
from orchestrator.commands.lease import Hold, holding
from orchestrator.commands.patience import Patience, described, patience_of
from orchestrator.commands.restarts import restarting
from orchestrator.commands.run_folder import RUNS, checkpoint_folder, keep_run_id, locked, policy_folder, run_id
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.deployment.cluster import running
from orchestrator.deployment.file import Deployment
from orchestrator.evaluation.evaluator import Evaluator
from orchestrator.experience.agents import Agents
from orchestrator.experience.answers import Answers
from orchestrator.experience.collector import Collector, OldLogprobs
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import evaluation_requests
from orchestrator.experience.stream import Stream
from orchestrator.learners import CriticLearner, Learner
from orchestrator.loop.checkpoint import Checkpoints
from orchestrator.loop.checkpoint_folder import Checkpoint, clear, latest
from orchestrator.loop.identities import identities, user_identities
from orchestrator.loop.state import TrainState
from orchestrator.loop.trainer import Trainer
from orchestrator.loop.watch import watching_certificates, watching_services
from orchestrator.monitoring.metrics import EVALUATIONS, JOURNAL, TRACE, MetricsLog
from orchestrator.monitoring.progress import Progress
from orchestrator.monitoring.record import Record
from orchestrator.monitoring.run_log import RunLog
from orchestrator.policy.early import early_logprobs
from orchestrator.policy.ranks import Policy
from orchestrator.push.newcomers import Newcomers, registered, taking_newcomers
from orchestrator.push.prover import make_prover
from orchestrator.push.pusher import WeightPusher
from orchestrator.tracing.activity import parts_with
from orchestrator.tracing.file import TraceFile
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import Spans
from orchestrator.tracing.waits import Waits
from quartet.config.base import ConfigError
from quartet.ranks.group import RanksLost
from quartet.threads import in_thread
from quartet.wire.callers import Purpose
from quartet.wire.errors import ResourceExhausted
from services.rollout.session_client import SessionClient


@contextmanager
def connected_ray() -> Iterator[None]:
    """Context with a connection to the cluster of RAY_ADDRESS, or else to the one that `quartet up` started in this
    folder. ConfigError if neither exists."""
    cluster = running()
    address = os.environ.get("RAY_ADDRESS") or (cluster.address if cluster else None)
    if address is None:
        raise ConfigError("no Ray cluster: run `quartet up` here first, or set RAY_ADDRESS")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        with ended_like_interrupted():
            yield
    finally:
        ray.shutdown()


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Context in which SIGTERM, with which batch systems and containers end a program, is taken as Ctrl-C is. Opened
    after `ray.init`, whose own handler writes stack traces and ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set handlers: those of a script are the script's
        return
    loop, run = asyncio.get_running_loop(), asyncio.current_task()
    assert run is not None
    # Not by SIGINT, which is ignored where `nohup` or a script started the run in the background.
    before = signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(run.cancel))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


async def train(
    deployment: Deployment,
    progress: Progress,
    *,
    overwrite: bool = False,
    resume: bool = False,
    take_over: bool = False,
    accept_changed_services: bool = False,
) -> Path:
    """Carries out one PPO run from start to end; returns its folder.

    Errors in the input are found before the policy learner starts.

    Args:
        deployment: the configuration.
        progress: shows each step.
        overwrite: True to replace an earlier run of the same name.
        resume: True to continue that run from its last checkpoint.
        accept_changed_services: True to resume although services have other models than at the checkpoint.
        take_over: True to claim the services even if another run holds them, which ends that run.

    Raises:
        ConfigError: the configuration, the data or the services do not fit together.
        LeaseLost: another run trains with the services.
        ServiceError, RanksLost: a service does not come within timeouts.start_s, or it or the learner failed and
            the restarts are used up.
    """
    if not (resume or overwrite):
        # Before the models are read and the services waited for, which that very run may still hold.
        clear(checkpoint_folder(deployment.orchestrator), overwrite=False)
    deployment = decided_here(deployment)
    config = deployment.orchestrator
    inputs = preflight(deployment)
    services = Services.connect(config)
    run_dir = RUNS / config.name
    try:
        with RunLog.of(progress) as log, deployment.naming():
            patience = patience_of(deployment, log.note)
            async with ending_halted(), sessions_of(deployment) as sessions:
                infos = await described(services, deployment, patience)
                check_compatible(infos, inputs.tokenizer, config)
                for line in await in_thread(partial(outdated, deployment, infos), "services"):
                    log.note(deployment.worded(line))
                await await_door(sessions)
                with locked(run_dir, checkpoint_folder(config)):
                    if resume:  # also where it cannot go on
                        log.keep_in(run_dir)
                    with connected_ray():
                        run = Run(deployment, inputs, services, sessions, log, run_dir, accept_changed_services)
                        await run.finish(patience, overwrite=overwrite, resume=resume, take_over=take_over)
    finally:
        await services.close()
    return run_dir


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run that survive a restart of its learners."""

    deployment: Deployment
    inputs: Inputs
    services: Services
    sessions: SessionClient | None
    """Sessions of the run's agent; None if it has none."""
    progress: RunLog
    run_dir: Path
    accept_changed_services: bool

    async def finish(self, patience: Patience, *, overwrite: bool, resume: bool, take_over: bool) -> None:
        """Trains to the end; goes back to the last checkpoint when a learner or, for long, a service is lost. Until
        training begins, `patience` waits for what is being replaced."""
        run, ttl_s, note = run_id(self.run_dir, resume=resume), self._config.timeouts.lease_s, self.progress.note
        claimed = holding(self.services, run, patience, ttl_s=ttl_s, take_over=take_over, note=note)

        opened = registered(self.services.rollout.application, patience)
        # Claimed before anything is removed or restored, since another run may be using these services.
        certificates = watching_certificates({*targets_of(self._config).values()}, note)
        async with (
            certificates,
            claimed as hold,
            opened as desk,
            taking_newcomers(desk, lambda: self.services.rollout.lease, ttl_s) as newcomers,
        ):
            if not resume:
                clear(self._checkpoints, overwrite=overwrite)
            keep_run_id(self.run_dir, run)
            await self._finish(hold, newcomers, overwrite=overwrite, resume=resume)

    async def _finish(self, hold: Hold, newcomers: Newcomers, *, overwrite: bool, resume: bool) -> None:
        checkpoint = to_resume(self.run_dir, self.deployment, self.progress.note) if resume else None
        for note in self.inputs.notes:
            self.progress.note(self.deployment.worded(note))

        async def carry_out(checkpoint: Checkpoint[TrainState] | None, attempt: int) -> None:
            again = resume or attempt > 0
            await self._train(checkpoint, hold, newcomers, attempt, overwrite=overwrite, resume=again)

        def last() -> Checkpoint[TrainState] | None:
            return latest(self._checkpoints)

        await restarting(carry_out, checkpoint, last, self._config.checkpoint, self.progress.note)

    @property
    def _config(self) -> OrchestratorConfig:
        return self.deployment.orchestrator

    @property
    def _checkpoints(self) -> Path:
        return checkpoint_folder(self._config)

    async def _train(
        self,
        checkpoint: Checkpoint[TrainState] | None,
        hold: Hold,
        newcomers: Newcomers,
        attempt: int,
        *,
        overwrite: bool,
        resume: bool,
    ) -> None:
        """Trains from a checkpoint, or from the start; `attempt` counts from 0."""
        config, services, run_dir = self._config, self.services, self.run_dir
        note = self.progress.note
        infos = await patience_of(self.deployment, note)(services.infos)
        services_now = identities(infos)
        now = services_now | user_identities(self.inputs.environment, self.inputs.agent)
        if checkpoint:
            state = resumed_state(checkpoint.state, now, accept=self.accept_changed_services, note=note)
        else:
            state = first_state(config, infos, now, note)
        after = state.step if checkpoint else -1 if resume else None
        with (
            MetricsLog.open(
                run_dir, config.log, self.deployment.record, overwrite=overwrite, resume_after=after
            ) as log,
            TraceFile(run_dir / TRACE, note) as trace,
            Spans(trace.write) as spans,
        ):
            self.progress.keep_in(run_dir)
            policy = await self._policy(attempt)
            try:
                learners = self._learners(policy, state)
                if resume:  # what was begun since the checkpoint, or at an earlier start, is of no timeline from here
                    # Of its own, as the ranks may have taken long to start.
                    await hold.begin_timeline(patience_of(self.deployment, note))
                if checkpoint:
                    await restore(learners, checkpoint)
                elif services.critic is not None and state.critic_step is not None:
                    await services.critic.adopt(state.critic_step, config.timeouts.train_s)
                prover = make_prover(config, policy, infos.rollout.model, self.inputs.distribution.vocabulary)
                backend = agreed_backend(config.weights.backend, infos.rollout.weight_backend)
                pusher = WeightPusher(services.rollout, policy, backend, config.weights, prover, spans)
                journal = self._journal({place: identity.digest for place, identity in now.items()})
                checkpoints = Checkpoints(self._checkpoints, config.checkpoint, learners, journal, note)
                prompts = PromptStream(self.inputs.train.prompts, config.seed, config.algorithm.samples_per_prompt)
                early = early_logprobs(policy.logprobs) if config.early_logprobs else None
                collector = self._collector(services, Purpose.TRAINING, SampleStages(spans), early)
                opened = partial(Stream, config, prompts, collector, journal)
                record = Record(log, self.progress, config.steps)
                waits = Waits(spans, parts_with([each.name for each in learners]))
                evaluator = self._evaluator(SampleStages(spans, key="held_out"))
                trainer = Trainer(config, opened, policy, learners, pusher, checkpoints, evaluator, record, waits)
                brought = newcomers.brought_by(pusher)
                async with pusher, brought, watching_services(services, services_now), checkpoints:
                    save_to = policy_folder(config).resolve()
                    await trainer.run(state, save_to, resumed=checkpoint is not None)
            finally:
                await policy.close()

    async def _policy(self, attempt: int) -> Policy:
        ranks = self._config.policy.ranks
        self.progress.note(f"starting the policy's learner, {ranks} rank{'s' if ranks > 1 else ''}")
        try:
            return await Policy.start(self._config, self.inputs.distribution)
        except ResourceExhausted as error:
            if attempt == 0:
                raise
            # The cluster has had room for it: a process of Ray's, or of the new ranks, stands still.
            raise RanksLost(str(error)) from None

    def _learners(self, policy: Policy, state: TrainState) -> list[Learner]:
        """The models that this run trains: the policy, and the critic if its advantages need one."""
        learners: list[Learner] = [policy]
        if self.services.critic is not None and state.first_critic_step is not None:
            learners.append(CriticLearner(self.services.critic, self._config, state.first_critic_step))
        return learners

    def _journal(self, services: Mapping[str, str]) -> ExperienceJournal | None:
        if not self._config.checkpoint.journal:
            return None
        return ExperienceJournal(self.run_dir / JOURNAL, self._config, self.progress.note, services=services)

    def _collector(
        self, services: Services, purpose: Purpose, stages: SampleStages, old_logprobs: OldLogprobs | None = None
    ) -> Collector:
        config, inputs, ends = self._config, self.inputs, self.inputs.distribution.end_ids
        answers = Answers.of(inputs.environment, config, inputs.tokenizer, ends)
        agents = Agents.of(inputs.agent, config, self.sessions, self.services.rollout, purpose)
        return Collector(services, config, ends, stages, old_logprobs, answers, agents, self.progress.note)

    def _evaluator(self, stages: SampleStages) -> Evaluator | None:
        config, inputs = self._config, self.inputs
        if inputs.held_out is None:
            return None
        purpose = Purpose.EVALUATION
        return Evaluator(
            self._collector(self.services.declaring(config.name, purpose), purpose, stages),
            evaluation_requests(config, evaluation_prompts(inputs.held_out, config)),
            config.algorithm,
            inputs.tokenizer,
            inputs.judges,
            config.evaluation.judge_s,
            self.run_dir / EVALUATIONS,
        )
