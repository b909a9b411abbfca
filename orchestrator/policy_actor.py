"""The policy learner as a Ray actor, and its asynchronous face with a deadline on every call."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from orchestrator.config import OrchestratorConfig, WeightsConfig
from orchestrator.policy import PolicyBatch, PolicyTrainer
from services.common.arrays import Floats, Ints
from services.common.errors import DeadlineExceeded, Internal
from services.common.weight_transfer.buckets import checksum


class PolicyError(RuntimeError):
    """The policy learner failed or died; training cannot go on."""


class Policy:
    """What the loop needs of the policy learner."""

    def __init__(self, actor: Any, config: OrchestratorConfig) -> None:
        self._actor = actor
        self._timeouts = config.timeouts
        self._weights = config.weights

    @classmethod
    async def start(cls, config: OrchestratorConfig) -> "Policy":
        """Starts the actor and returns when its model is loaded.

        Raises:
            DeadlineExceeded: not within timeouts.start_s, usually because the cluster has not the CPUs or GPUs.
        """
        actor = (
            ray.remote(PolicyTrainer)
            .options(
                num_cpus=config.policy.num_cpus,
                num_gpus=config.policy.num_gpus,
                runtime_env={"env_vars": config.policy.env_vars},
                max_concurrency=1,
                concurrency_groups={"admit": 1},
            )
            .remote(config.policy, config.ppo, config.sampling.temperature)
        )
        policy = cls(actor, config)
        await policy._call(actor.__ray_ready__.remote(), "start", config.timeouts.start_s)
        return policy

    async def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """See PolicyTrainer.logprobs."""
        answer: list[Floats] = await self._call(
            self._actor.logprobs.remote(prompts, responses), "logprobs", self._timeouts.train_s
        )
        return answer

    async def train(self, batch: PolicyBatch, seed: int) -> dict[str, float]:
        """See PolicyTrainer.train."""
        metrics: dict[str, float] = await self._call(
            self._actor.train.remote(batch, seed), "train", self._timeouts.train_s
        )
        return metrics

    async def rendezvous(self, backend: str) -> list[int]:
        """See PolicyTrainer.rendezvous."""
        weights: WeightsConfig = self._weights
        call = self._actor.rendezvous.remote(
            backend, host=weights.host, bucket_bytes=weights.bucket_mib << 20, stall_s=weights.stall_s
        )
        return [int(await self._call(call, "rendezvous", weights.timeout_s))]

    async def join(self, epoch: int, world_size: int) -> bytes:
        """See PolicyTrainer.join."""
        call = self._actor.join.remote(epoch, world_size)
        return bytes(await self._call(call, "join", self._weights.stall_s + 5))

    async def gather(self) -> None:
        """See PolicyTrainer.gather."""
        await self._call(self._actor.gather.remote(), "gather", self._weights.timeout_s)

    async def send(self) -> str:
        """The checksum of what was sent. See PolicyTrainer.send."""
        return checksum(await self._call(self._actor.send.remote(), "send", self._weights.timeout_s + 1))

    async def admit(self, epoch: int, world_size: int) -> None:
        """See PolicyTrainer.admit."""
        call = self._actor.admit.options(concurrency_group="admit").remote(epoch, world_size)
        await self._call(call, "admit", self._weights.timeout_s)

    async def save(self, folder: str) -> str:
        """See PolicyTrainer.save."""
        return str(await self._call(self._actor.save.remote(folder), "save", self._timeouts.train_s))

    def stop(self) -> None:
        """Ends the actor."""
        ray.kill(self._actor)

    async def _call(self, reference: Any, name: str, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            raise DeadlineExceeded(f"policy.{name}: no answer within {timeout_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise PolicyError(f"policy.{name}: the learner's process is gone: {error}") from None
        except ray.exceptions.RayTaskError as error:
            raise Internal(f"policy.{name}: {type(error.cause).__name__}: {error.cause}") from error
