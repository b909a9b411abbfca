"""The PPO loop."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.batch import estimate_advantages, make_controller
from orchestrator.checkpoint import Checkpoints
from orchestrator.config import OrchestratorConfig
from orchestrator.data import PromptStream
from orchestrator.evaluation import Evaluator
from orchestrator.experience import Collected, Collector, Experience
from orchestrator.journal import ExperienceJournal
from orchestrator.metrics import MetricsLog
from orchestrator.policy import PolicyBatch
from orchestrator.progress import Progress, TimeLeft
from orchestrator.services import Services
from orchestrator.state import TrainState
from orchestrator.weights import PushReport
from services.common.arrays import Floats, Ints

Result = TypeVar("Result")


class Policy(Protocol):
    """What the loop needs of the policy learner."""

    async def logprobs(self, prompts: list[Ints], responses: list[Ints]) -> list[Floats]:
        """Under the current weights."""

    async def train(self, batch: PolicyBatch, seed: int) -> dict[str, float]:
        """One batch."""

    async def save(self, folder: str) -> str:
        """In Hugging Face's format."""


class Pusher(Protocol):
    """What the loop needs of the weight push."""

    async def push(self, version: int) -> PushReport:
        """Brings every rollout replica to `version`."""


class Trainer:
    """Runs PPO: collect, estimate, update, push, step after step."""

    def __init__(
        self,
        config: OrchestratorConfig,
        services: Services,
        policy: Policy,
        pusher: Pusher,
        prompts: PromptStream,
        journal: ExperienceJournal | None,
        checkpoints: Checkpoints,
        evaluator: Evaluator | None,
        log: MetricsLog,
        progress: Progress,
    ) -> None:
        self._config = config
        self._critic = services.critic
        self._policy = policy
        self._pusher = pusher
        self._prompts = prompts
        self._collector = Collector(services, config)
        self._journal = journal
        self._checkpoints = checkpoints
        self._evaluator = evaluator
        self._log = log
        self._progress = progress
        self._time_left = TimeLeft(config.steps)

    async def run(self, state: TrainState, save_to: Path, *, resumed: bool = False) -> None:
        """Trains from `state` to the configured number of steps and saves the policy.

        Consumes prompts; waits for the services and the learner; any failure beyond the clients' retries ends
        the run with that error, everything logged until then.

        Args:
            state: that of the learners.
            save_to: the trained policy's folder.
            resumed: `state` is a checkpoint's.
        """
        # Also at the start: whatever the replicas served before, they now serve this learner's weights.
        await self._pusher.push(state.policy_version)
        self._progress.start(self._config.steps, state.step)
        try:
            if not resumed:
                if self._evaluator:
                    self._log.write(0, await self._evaluate(state))
                await self._checkpoints.first(state)
            while state.step < self._config.steps:
                state = await self._step(state)
                await self._checkpoints.after(state)
            await self._policy.save(str(save_to))
        finally:
            self._progress.stop()

    async def _step(self, state: TrainState) -> TrainState:
        began = time.monotonic()
        collected = await self._collect(state)
        prompts, responses = _sequences(collected.experiences)
        old_logprobs, logprobs_s = await _timed(self._policy.logprobs(prompts, responses))
        controller = make_controller(self._config.ppo, state.kl_coef)
        estimate = estimate_advantages(
            collected.experiences, old_logprobs, self._config.ppo, controller.coef, state.normaliser
        )
        batch = PolicyBatch(
            prompts=prompts,
            responses=responses,
            logprobs=[e.sample.logprobs for e in collected.experiences],
            old_logprobs=old_logprobs,
            ref_logprobs=[e.ref_logprobs for e in collected.experiences],
            advantages=estimate.advantages,
            kl_coef=controller.coef,
        )
        (policy, critic), train_s = await _timed(self._update(state, batch, collected, estimate.returns))
        done = state.after(
            kl_coef=controller.update(estimate.kl, len(prompts)).coef,
            normaliser=estimate.normaliser,
            asked=len(prompts) + collected.repeated,
            used=len(prompts),
        )
        pushed = await self._pusher.push(done.policy_version)
        metrics = estimate.metrics | policy | critic | _ledger(state, done, collected)
        metrics |= _speeds(collected, train_s, self._config.ppo.epochs)
        metrics |= {"seconds/logprobs": logprobs_s, "seconds/train": train_s, "seconds/push": pushed.seconds}
        metrics |= {"seconds/step": time.monotonic() - began, "seconds/checkpoint": self._checkpoints.waited_s()}
        if self._evaluator and self._is_evaluated(done.step):
            metrics |= await self._evaluate(done)
        self._report(done.step, metrics)
        return done

    async def _collect(self, state: TrainState) -> Collected:
        """The next step's experience: from the journal, if it is there from before the run went back."""
        step = state.step + 1
        prompts = self._prompts.batch(step)
        if self._journal and (kept := self._journal.read(step, prompts)):
            return kept
        collected = await self._collector.collect(
            prompts, step=step, version=state.policy_version, critic_step=state.critic_step
        )
        if self._journal:
            await asyncio.to_thread(self._journal.write, step, collected)
        return collected

    async def _update(
        self, state: TrainState, batch: PolicyBatch, collected: Collected, returns: list[Floats]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Policy and critic at the same time: neither needs the other's new weights."""
        config = self._config
        seed = config.seed * 1_000_003 + state.step + 1
        async with asyncio.TaskGroup() as group:
            policy = group.create_task(self._policy.train(batch, seed))
            critic = group.create_task(
                self._critic.train(
                    state.critic_step + 1,
                    batch.prompts,
                    batch.responses,
                    [e.values for e in collected.experiences],
                    returns,
                    epochs=config.ppo.epochs,
                    minibatch_size=config.ppo.minibatch_size,
                    seed=seed,
                    last_step=state.critic_step,
                    timeout_s=config.timeouts.train_s,
                )
            )
        return (
            {f"policy/{name}": value for name, value in policy.result().items()},
            {f"value/{name}": value for name, value in critic.result().items()},
        )

    def _is_evaluated(self, step: int) -> bool:
        every = self._config.evaluation.every
        return every > 0 and (step % every == 0 or step == self._config.steps)

    async def _evaluate(self, state: TrainState) -> dict[str, float]:
        assert self._evaluator is not None
        metrics, seconds = await _timed(self._evaluator.evaluate(state.step, state.policy_version))
        return metrics | {"seconds/evaluate": seconds}

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        self._log.write(step, metrics)
        self._progress.step(step, metrics, self._time_left.after(step, metrics["seconds/step"]))


def _sequences(experiences: list[Experience]) -> tuple[list[Ints], list[Ints]]:
    return [e.prompt.prompt_ids for e in experiences], [e.sample.response_ids for e in experiences]


def _ledger(before: TrainState, done: TrainState, collected: Collected) -> dict[str, float]:
    """What was asked for, what had to be asked for again, what was used; and by which weights it was sampled."""
    oldest = min(experience.sample.oldest_version for experience in collected.experiences)
    return {
        "samples/asked": done.samples_asked - before.samples_asked,
        "samples/repeated": collected.repeated,
        "samples/used": done.samples_used - before.samples_used,
        "samples/used_total": done.samples_used,
        "policy/version": done.policy_version,
        "policy/staleness": before.policy_version - oldest,
    }


def _speeds(collected: Collected, train_s: float, epochs: int) -> dict[str, float]:
    return {
        "tokens_per_s/generation": collected.tokens / collected.generate_s,
        "tokens_per_s/training": collected.tokens * epochs / train_s,
        "seconds/generate": collected.generate_s,
        "seconds/score": collected.score_s,
    }


async def _timed(awaitable: Awaitable[Result]) -> tuple[Result, float]:
    """The result, and the seconds it took."""
    began = time.monotonic()
    return await awaitable, time.monotonic() - began
