"""The PPO loop."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.batch import estimate_advantages, make_controller
from orchestrator.config import OrchestratorConfig
from orchestrator.data import PromptStream
from orchestrator.evaluation import Evaluator
from orchestrator.experience import Collected, Collector, Experience
from orchestrator.metrics import MetricsLog
from orchestrator.policy import PolicyBatch
from orchestrator.ppo import RunningNormaliser
from orchestrator.progress import Progress, TimeLeft
from orchestrator.services import Services
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


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: services that already served another run have counted further."""

    policy_version: int
    critic_step: int


class Trainer:
    """Runs PPO: collect, estimate, update, push, step after step."""

    def __init__(
        self,
        config: OrchestratorConfig,
        services: Services,
        policy: Policy,
        pusher: Pusher,
        prompts: PromptStream,
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
        self._evaluator = evaluator
        self._log = log
        self._progress = progress
        self._controller = make_controller(config.ppo)
        self._normaliser = RunningNormaliser()
        self._time_left = TimeLeft(config.steps)

    async def run(self, start: Start, save_to: Path) -> None:
        """Trains for the configured number of steps and saves the policy.

        Consumes prompts; waits for the services and the learner; any failure beyond the clients' retries ends
        the run with that error, everything logged until then.
        """
        self._critic_step = start.critic_step
        self._version = start.policy_version + 1
        # Also at the start: whatever the replicas served before, they now serve this learner's weights.
        await self._pusher.push(self._version)
        self._progress.start(self._config.steps)
        try:
            if self._evaluator:
                self._log.write(0, await self._evaluate(0))
            for step in range(1, self._config.steps + 1):
                await self._step(step)
            await self._policy.save(str(save_to))
        finally:
            self._progress.stop()

    async def _step(self, step: int) -> None:
        began = time.monotonic()
        collected = await self._collector.collect(self._prompts.batch(step), step=step, min_version=self._version)
        prompts, responses = _sequences(collected.experiences)
        old_logprobs, logprobs_s = await _timed(self._policy.logprobs(prompts, responses))
        estimate = estimate_advantages(
            collected.experiences, old_logprobs, self._config.ppo, self._controller.coef, self._normaliser
        )
        batch = PolicyBatch(
            prompts=prompts,
            responses=responses,
            logprobs=[e.sample.logprobs for e in collected.experiences],
            old_logprobs=old_logprobs,
            ref_logprobs=[e.ref_logprobs for e in collected.experiences],
            advantages=estimate.advantages,
            kl_coef=self._controller.coef,
        )
        (policy, critic), train_s = await _timed(self._update(step, batch, collected, estimate.returns))
        staleness = self._version - min(e.sample.oldest_version for e in collected.experiences)
        self._controller = self._controller.update(estimate.kl, len(prompts))
        self._normaliser = estimate.normaliser
        self._version += 1
        pushed = await self._pusher.push(self._version)
        metrics = estimate.metrics | policy | critic
        metrics |= {"policy/version": self._version, "policy/staleness": staleness}
        metrics |= _speeds(collected, train_s, self._config.ppo.epochs)
        metrics |= {"seconds/logprobs": logprobs_s, "seconds/train": train_s, "seconds/push": pushed.seconds}
        metrics["seconds/step"] = time.monotonic() - began
        if self._evaluator and self._is_evaluated(step):
            metrics |= await self._evaluate(step)
        self._report(step, metrics)

    async def _update(
        self, step: int, batch: PolicyBatch, collected: Collected, returns: list[Floats]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Policy and critic at the same time: neither needs the other's new weights."""
        config = self._config
        seed = config.seed * 1_000_003 + step
        async with asyncio.TaskGroup() as group:
            policy = group.create_task(self._policy.train(batch, seed))
            critic = group.create_task(
                self._critic.train(
                    self._critic_step + step,
                    batch.prompts,
                    batch.responses,
                    [e.values for e in collected.experiences],
                    returns,
                    epochs=config.ppo.epochs,
                    minibatch_size=config.ppo.minibatch_size,
                    seed=seed,
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

    async def _evaluate(self, step: int) -> dict[str, float]:
        assert self._evaluator is not None
        metrics, seconds = await _timed(self._evaluator.evaluate(step, self._version))
        return metrics | {"seconds/evaluate": seconds}

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        self._log.write(step, metrics)
        self._progress.step(step, metrics, self._time_left.after(step, metrics["seconds/step"]))


def _sequences(experiences: list[Experience]) -> tuple[list[Ints], list[Ints]]:
    return [e.prompt.prompt_ids for e in experiences], [e.sample.response_ids for e in experiences]


def _speeds(collected: Collected, train_s: float, epochs: int) -> dict[str, float]:
    return {
        "tokens_per_s/generation": collected.tokens / collected.generate_s,
        "tokens_per_s/training": collected.tokens * epochs / train_s,
        # The ledger: as many are used as were asked for, however many it took.
        "samples/asked": len(collected.experiences) + collected.repeated,
        "samples/repeated": collected.repeated,
        "samples/used": len(collected.experiences),
        "seconds/generate": collected.generate_s,
        "seconds/score": collected.score_s,
    }


async def _timed(awaitable: Awaitable[Result]) -> tuple[Result, float]:
    """The result, and the seconds it took."""
    began = time.monotonic()
    return await awaitable, time.monotonic() - began
