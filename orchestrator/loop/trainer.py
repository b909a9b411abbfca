"""The PPO loop."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.algorithms.kl import adapted
from orchestrator.config.run import OrchestratorConfig
from orchestrator.evaluation.evaluator import Evaluator
from orchestrator.experience.beside import Beside
from orchestrator.experience.checks import check_ages, check_own_logprobs
from orchestrator.experience.experience import Collected
from orchestrator.experience.stream import Stream
from orchestrator.learners import Learner, Update
from orchestrator.loop.batch import Batch
from orchestrator.loop.checkpoint import Checkpoints, end_if_stuck
from orchestrator.loop.estimate import (
    Advantages,
    Distance,
    estimate_advantages,
    measure_distance,
    old_logprobs_of,
)
from orchestrator.loop.mismatch import MismatchWatch
from orchestrator.loop.publishing import Publishing, Pusher
from orchestrator.loop.state import TrainState
from orchestrator.loop.step_metrics import StepReport, calls, ledger, process, speeds, staleness, turns
from orchestrator.monitoring.record import Record
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from quartet.wire.codec import Floats

SKIPPED = "skipped_in_a_row"
"""Metric of each learner with the number of its skipped optimizer steps in a row."""


class TrainedPolicy(Protocol):
    """The methods that the loop uses of the policy alone."""

    async def logprobs(self, trajectories: Columns) -> Floats:
        """Log-probs under the current weights, [M]."""

    async def trained_logprobs(self) -> list[Floats]:
        """Log-probs of the last batch that came without old ones, under the weights before its update: of all
        responses in the first minibatch, [0] for others."""

    async def save(self, folder: Path) -> None:
        """Writes the model in Hugging Face's format."""


class Trainer:
    """Runs PPO: take, estimate, update, publish, step after step."""

    def __init__(
        self,
        config: OrchestratorConfig,
        opened: Callable[..., Stream],
        policy: TrainedPolicy,
        learners: Sequence[Learner],
        pusher: Pusher,
        checkpoints: Checkpoints,
        evaluator: Evaluator | None,
        record: Record,
        waits: Waits,
    ) -> None:
        """`opened` is a Stream with all arguments but those that say where the run is."""
        self._config = config
        self._opened = opened
        self._policy = policy
        self._learners = learners
        self._pusher = pusher
        self._checkpoints = checkpoints
        self._evaluator = evaluator
        self._record = record
        self._waits = waits
        self._mismatch = MismatchWatch(config.loop, config.policy.dtype, record.note)

    async def run(self, state: TrainState, save_to: Path, *, resumed: bool = False) -> None:
        """Trains from `state` to the configured number of steps and saves the policy.

        Waits for the services and the learner. A failure beyond the clients' retries ends the run with that error;
        all steps until then are logged.

        Args:
            state: the state of the loop and the learners.
            save_to: the trained policy's folder.
            resumed: True if `state` is from a checkpoint.
        """
        # Also at the start, so that replicas serve this learner's weights, whatever they served before.
        await self._pusher.push(state.policy_version)
        with self._record.running(state.step):
            if self._evaluator and not resumed:
                report = StepReport(self._waits)
                await self._evaluate(state, report)
                self._record.before_training(report.metrics())
            self._waits.begin()
            if not resumed:
                with self._waits("checkpoint"):
                    await self._checkpoints.first(state)
            async with Beside() as beside:
                stream = self._opened(beside, step=state.step, version=state.policy_version, used=state.used)
                publishing = Publishing(self._pusher, beside, stream.served, self._config)
                while state.step < self._config.steps:
                    state = await self._step(state, stream, publishing)
                    with self._waits("checkpoint"):
                        # Also after the last step, by which a finished run is known.
                        await self._checkpoints.take_if_due(state, last=state.step == self._config.steps)
                    await self._record.pause()
                await publishing.settled()
            await self._policy.save(save_to)
            await self._pusher.complete()

    async def _step(self, state: TrainState, stream: Stream, publishing: Publishing) -> TrainState:
        """Carries out one step: takes experience, estimates advantages, updates the learners, publishes."""
        report = StepReport(self._waits)
        batch = await self._take(state, stream, publishing, report)
        update, estimate = self._estimate(state, batch)
        learned = await self._update(update, report)
        distance = await self._distance(batch, state.policy_version)
        done = self._advanced(state, batch, estimate, distance, learned)
        with report.stage("publish"):
            await publishing.publish(done.policy_version)
        collected = batch.collected
        report.add(estimate.metrics | distance.metrics | learned | ledger(state, done, collected))
        report.add(staleness(state.policy_version, collected) | turns(collected) | process(collected))
        report.add(calls(collected) if self._config.environment else {})
        report.add(speeds(collected, report.seconds("train"), self._config.algorithm.epochs))
        if self._evaluator and self._is_evaluated(done.step):
            with report.stage("publish"):
                await publishing.settled()
            await self._evaluate(done, report)
        report.add(publishing.measured() | {"seconds/checkpoint": self._checkpoints.waited_s()})
        self._log(done, report)
        return done

    def _advanced(
        self,
        state: TrainState,
        batch: Batch,
        estimate: Advantages,
        distance: Distance,
        learned: dict[str, float],
    ) -> TrainState:
        """The state after the step that trained on this batch."""
        return state.advanced(
            kl_coef=self._adapted(state, distance.kl, len(batch)),
            normalisers=estimate.normalisers,
            asked=len(batch.collected.numbers) + batch.collected.repeated,
            used=batch.collected.scored,
            discarded=len(batch.collected.discarded),
            skipped_in_a_row=int(max(learned.get(f"{learner.prefix}/{SKIPPED}", 0) for learner in self._learners)),
        )

    def _kl_coef(self, state: TrainState) -> float:
        """Coefficient of the KL penalty in the next batch."""
        kl = self._config.algorithm.kl
        return kl.coef if kl.target is None or state.kl_coef is None else state.kl_coef

    def _adapted(self, state: TrainState, measured: float | None, samples: int) -> float | None:
        """The coefficient after the next batch, of so many samples, whose KL was measured; None if it is not
        adapted."""
        algorithm = self._config.algorithm
        kl = algorithm.kl
        if kl.target is None:
            return None
        # A policy that does not move yet says nothing about the coefficient that it will need.
        if measured is None or not algorithm.trains_policy(state.step + 1):
            return state.kl_coef
        return adapted(self._kl_coef(state), measured, samples, target=kl.target, horizon=kl.horizon)

    def _log(self, done: TrainState, report: StepReport) -> None:
        """Logs the step. MismatchError or NotFinite if the run has to end after it."""
        metrics = report.metrics() | {"seconds/step": report.elapsed_s}
        self._record.step(done.step, metrics | self._waits.step(done.step))
        self._mismatch.check(done.step, metrics)
        end_if_stuck(done, self._config.checkpoint, self._checkpoints.last_step)

    async def _take(self, state: TrainState, stream: Stream, publishing: Publishing, report: StepReport) -> Batch:
        """The next batch, with the critic's values and the policy's own log-probs from before the update; without
        log-probs where the update computes them itself. StaleSample if one of its tokens is older than the
        configured bound."""
        step, version, algorithm = state.step + 1, state.policy_version, self._config.algorithm
        with report.stage("take"), self._waits.for_batch() as numbers:
            collected = await stream.take(step, critic_step=state.critic_step)
            numbers.update(collected.trained_numbers)
        check_ages(collected.columns, step, version, self._config.loop.max_staleness)
        await publishing.rest()
        with report.stage("logprobs"):
            async with asyncio.TaskGroup() as group:
                valued = group.create_task(stream.complete(step, collected, critic_step=state.critic_step))
                own = group.create_task(self._old_logprobs(collected, step))
        whole = valued.result().with_sampled(**own.result())
        return Batch.of(whole, algorithm.oldest_trained(version), algorithm.chosen(collected.outcomes))

    async def _old_logprobs(self, collected: Collected, step: int) -> dict[str, Floats]:
        """The column of the policy's own log-probs from before the update; nothing where the samples have it already,
        or the update computes it itself."""
        algorithm = self._config.algorithm
        needed = algorithm.needs_old_logprobs(len(collected)) or not algorithm.trains_policy(step)
        if "old_logprobs" in collected.columns or not needed:
            return {}
        own = await self._waits.on("policy").timing("logprobs", self._policy.logprobs(collected.columns))
        check_own_logprobs([own])
        return {"old_logprobs": own}

    async def _distance(self, batch: Batch, version: int) -> Distance:
        """Measures the batch by the policy's log-probs from before the update, which the update may have computed, of
        all of it or of the first minibatch."""
        if "old_logprobs" in batch.columns:
            own = batch.columns.rows("old_logprobs")
        else:
            own = await self._policy.trained_logprobs()
            check_own_logprobs(own)
        return measure_distance(batch, own, self._config.algorithm, version)

    def _estimate(self, state: TrainState, batch: Batch) -> tuple[Update, Advantages]:
        """The update for the learners, from the batch and the advantages of its tokens."""
        algorithm = self._config.algorithm
        kl_coef = self._kl_coef(state)
        longest, step = self._config.sampling.max_new_tokens, state.step + 1
        old_logprobs = old_logprobs_of(batch, algorithm)
        estimate = estimate_advantages(
            batch, old_logprobs, algorithm, kl_coef, state.normalisers, step=step, longest=longest
        )
        if not batch.mask.any():
            self._record.note(f"step {step}: nothing is trained on, as {batch.reasons}")
        seed = self._config.seed * 1_000_003 + step
        returns = {} if estimate.returns is None else {"returns": estimate.returns}
        columns = batch.columns.with_sampled(advantages=estimate.advantages, **returns)
        return Update(step, seed, columns, kl_coef), estimate

    async def _update(self, update: Update, report: StepReport) -> dict[str, float]:
        """Trains all learners at the same time, as none needs another's new weights; their metrics."""
        with report.stage("train"):
            async with asyncio.TaskGroup() as group:
                trained = {
                    each.prefix: group.create_task(
                        self._waits.on(each.name).timing("train", each.train(update), step=update.step)
                    )
                    for each in self._learners
                }
        return {
            f"{prefix}/{name}": value for prefix, task in trained.items() for name, value in task.result().items()
        }

    def _is_evaluated(self, step: int) -> bool:
        every = self._config.evaluation.every
        return every > 0 and (step % every == 0 or step == self._config.steps)

    async def _evaluate(self, state: TrainState, report: StepReport) -> None:
        assert self._evaluator is not None
        with report.stage("evaluate"):
            report.add(await self._evaluator.evaluate(state.step, state.policy_version))
