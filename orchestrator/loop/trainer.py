"""The PPO loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from orchestrator.config.run import OrchestratorConfig
from orchestrator.evaluation.evaluator import Evaluator
from orchestrator.experience.beside import Beside
from orchestrator.experience.checks import check_own_logprobs
from orchestrator.experience.experience import Collected
from orchestrator.experience.source import ExperienceSource
from orchestrator.experience.stream import Stream
from orchestrator.learners.learner import Learner, Update
from orchestrator.loop.batch import Batch
from orchestrator.loop.checkpoint import Checkpoints
from orchestrator.loop.estimate import (
    Advantages,
    Distance,
    estimate_advantages,
    make_controller,
    measure_distance,
)
from orchestrator.loop.measures import check_ages, ledger, speeds, staleness
from orchestrator.loop.mismatch import MismatchWatch
from orchestrator.loop.publishing import Publishing, Pusher
from orchestrator.loop.state import TrainState
from orchestrator.monitoring.record import Record, Stopwatch
from orchestrator.tracing.waits import Waits
from services.common.wire.codec import Floats, Ints
from services.common.wire.errors import NotFinite

SKIPPED = "skipped_in_a_row"
"""Metric of each learner with the number of its skipped optimizer steps in a row."""


class TrainedPolicy(Protocol):
    """The methods that the loop uses of the policy alone."""

    async def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """Log-probs under the current weights."""

    async def trained_logprobs(self) -> list[Floats]:
        """Log-probs of the last batch that came without old ones, under the weights before its update."""

    async def save(self, folder: str) -> str:
        """Writes the model in Hugging Face's format."""


class Trainer:
    """Runs PPO: take, estimate, update, publish, step after step."""

    def __init__(
        self,
        config: OrchestratorConfig,
        source: ExperienceSource,
        policy: TrainedPolicy,
        learners: Sequence[Learner],
        pusher: Pusher,
        checkpoints: Checkpoints,
        evaluator: Evaluator | None,
        record: Record,
        waits: Waits,
    ) -> None:
        self._config = config
        self._source = source
        self._policy = policy
        self._learners = learners
        self._pusher = pusher
        self._checkpoints = checkpoints
        self._evaluator = evaluator
        self._record = record
        self._waits = waits
        self._watch = MismatchWatch(config.loop, config.policy.dtype, record.note)

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
                watch = Stopwatch()
                with watch("evaluate"):
                    metrics = await self._evaluate(state)
                self._record.before_training(metrics | {"seconds/evaluate": watch["evaluate"]})
            self._waits.begin()
            if not resumed:
                with self._waits("checkpoint"):
                    await self._checkpoints.first(state)
            async with Beside() as beside:
                stream, publishing = self._begin(state, beside)
                while state.step < self._config.steps:
                    state = await self._step(state, stream, publishing)
                    with self._waits("checkpoint"):
                        await self._checkpoints.take_if_due(state)
                await publishing.settled()
            await self._policy.save(str(save_to))

    def _begin(self, state: TrainState, beside: Beside) -> tuple[Stream, Publishing]:
        """Sampling and publishing from `state` on, the tasks of both beside the loop."""
        stream = self._source.open(beside, step=state.step, version=state.policy_version, used=state.used)
        return stream, Publishing(self._pusher, beside, stream.served, self._config)

    async def _step(self, state: TrainState, stream: Stream, publishing: Publishing) -> TrainState:
        """Carries out one step: takes experience, estimates advantages, updates the learners, publishes."""
        watch = Stopwatch()
        with watch("take"):
            collected = await self._take(state, stream)
        await publishing.rest()
        with watch("logprobs"), self._waits("logprobs"):
            batch, old_logprobs = await self._valued(state, stream, collected)
        update, estimate = self._estimate(state, batch, old_logprobs)
        with watch("train"), self._waits("training"):
            learned = await self._update(update)
        distance = await self._distance(batch, old_logprobs, state.policy_version)
        done = self._done(state, collected, estimate, distance, learned)
        with watch("publish"), self._waits("push"):
            await publishing.publish(done.policy_version)
        metrics = estimate.metrics | distance.metrics | learned | ledger(state, done, collected)
        metrics |= staleness(state.policy_version, collected)
        metrics |= speeds(collected, watch["train"], self._config.ppo.epochs)
        if self._evaluator and self._is_evaluated(done.step):
            with watch("publish"), self._waits("push"):
                await publishing.settled()
            with watch("evaluate"):
                metrics |= await self._evaluate(done)
        metrics |= {
            "seconds/push": publishing.seconds,
            "seconds/checkpoint": self._checkpoints.waited_s(),
        } | watch.seconds()
        self._record.step(done.step, metrics | self._waits.step(done.step))
        self._watch.check(done.step, metrics)
        self._end_if_stuck(done)
        return done

    def _done(
        self,
        state: TrainState,
        collected: Collected,
        estimate: Advantages,
        distance: Distance,
        learned: dict[str, float],
    ) -> TrainState:
        count, controller = len(collected.experiences), make_controller(self._config.ppo, state.kl_coef)
        return state.advanced(
            kl_coef=(controller if distance.kl is None else controller.update(distance.kl, count)).coef,
            normaliser=estimate.normaliser,
            asked=count + collected.repeated,
            used=[experience.number for experience in collected.experiences],
            skipped_in_a_row=int(max(learned.get(f"{learner.prefix}/{SKIPPED}", 0) for learner in self._learners)),
        )

    def _end_if_stuck(self, state: TrainState) -> None:
        """Raises NotFinite after too many steps in a row that changed nothing."""
        config = self._config.checkpoint
        if state.skipped_in_a_row < config.max_skipped_steps:
            return
        last = self._checkpoints.last_step()
        raise NotFinite(
            f"step {state.step}: {state.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite "
            f"(checkpoint.max_skipped_steps: {config.max_skipped_steps}). "
            + ("There is no checkpoint" if last is None else f"The last good checkpoint is of step {last}; --resume")
            + ("" if last is None else " goes on from there, for instance with a lower learning rate")
        )

    async def _take(self, state: TrainState, stream: Stream) -> Collected:
        """The next batch. StaleSample if one of its tokens is older than the configured bound."""
        with self._waits.for_batch() as numbers:
            taken = await stream.take(state.step + 1, critic_step=state.critic_step)
            numbers.update(experience.number for experience in taken.experiences)
        check_ages(taken, state.step + 1, state.policy_version, self._config.loop.max_staleness)
        return taken

    async def _valued(
        self, state: TrainState, stream: Stream, collected: Collected
    ) -> tuple[Batch, list[Floats] | None]:
        """The batch with the critic's values, and the policy's own log-probs of it, both from before the update; no
        log-probs where the update computes them itself."""
        batch = Batch.of(collected.experiences, self._config.ppo.oldest_trained(state.policy_version))
        async with asyncio.TaskGroup() as group:
            valued = group.create_task(stream.complete(state.step + 1, collected, critic_step=state.critic_step))
            own = group.create_task(self._old_logprobs(batch))
        if (logprobs := own.result()) is not None:
            check_own_logprobs(logprobs)
        return replace(batch, experiences=valued.result().experiences), logprobs

    async def _old_logprobs(self, batch: Batch) -> list[Floats] | None:
        if (early := batch.old_logprobs) is not None or not self._config.ppo.needs_old_logprobs(len(batch)):
            return early
        own = self._policy.logprobs(batch.prompts, batch.responses)
        return await self._waits.on("policy").timing("logprobs", own)

    async def _distance(self, batch: Batch, old_logprobs: list[Floats] | None, version: int) -> Distance:
        """Measures the batch by the log-probs from before the update; None: by those that the update computed."""
        if old_logprobs is None:
            old_logprobs = await self._policy.trained_logprobs()
            check_own_logprobs(old_logprobs)
        return measure_distance(batch, batch.padded(old_logprobs), self._config.ppo, version)

    def _estimate(
        self, state: TrainState, batch: Batch, old_logprobs: list[Floats] | None
    ) -> tuple[Update, Advantages]:
        """The batch for the learners: the experience, the policy's own log-probs of it, and its advantages."""
        ppo, kl_coef = self._config.ppo, make_controller(self._config.ppo, state.kl_coef).coef
        padded = None if old_logprobs is None else batch.padded(old_logprobs)
        estimate = estimate_advantages(batch, padded, ppo, kl_coef, state.normaliser)
        trained = batch.for_policy(old_logprobs, estimate.advantages, kl_coef)
        step = state.step + 1
        if not batch.mask.any():
            self._record.note(
                f"step {step}: all its tokens are older than ppo.max_token_staleness ({ppo.max_token_staleness}), so "
                "that nothing is trained on"
            )
        seed = self._config.seed * 1_000_003 + step
        return Update(step, seed, trained, [e.values for e in batch.experiences], estimate.returns), estimate

    async def _update(self, update: Update) -> dict[str, float]:
        """Trains all learners at the same time, as none needs another's new weights; their metrics."""
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

    async def _evaluate(self, state: TrainState) -> dict[str, float]:
        assert self._evaluator is not None
        with self._waits("evaluation"):
            return await self._evaluator.evaluate(state.step, state.policy_version)
