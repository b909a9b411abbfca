"""The four services as the orchestrator sees them, and the check that they speak of the same tokens."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from orchestrator.config import OrchestratorConfig
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from services.common.client import open_channel
from services.common.config import ConfigError
from services.common.errors import Unavailable
from services.common.identity import tokenizer_hash
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient

REACH_S = 3.0
"""Longest wait for the connection, in seconds: whatever listens accepts one at once, however busy it is."""


@dataclass(frozen=True, slots=True)
class Infos:
    """What stands behind each service."""

    rollout: rollout_pb2.RolloutInfo
    reward: reward_pb2.RewardInfo
    reference: reference_pb2.ReferenceInfo
    critic: critic_pb2.CriticInfo


@dataclass(frozen=True, slots=True)
class Services:
    """One client per service, over one channel. Tests build it from fakes."""

    rollout: RolloutClient
    reward: RewardClient
    reference: ReferenceClient
    critic: CriticClient

    @classmethod
    def connect(cls, target: str) -> Self:
        """Clients of the Serve proxy at host:port; connects at the first call."""
        channel = open_channel(target)
        return cls(RolloutClient(channel), RewardClient(channel), ReferenceClient(channel), CriticClient(channel))

    async def reach(self, target: str, file: Path, timeout_s: float) -> None:
        """Returns once somebody answers at `target`, where the services of `file` should be.

        Raises:
            Unavailable: nobody does within `timeout_s`, at most REACH_S.
        """
        patience_s = min(timeout_s, REACH_S)
        if not await self.rollout.reachable(patience_s):
            raise Unavailable(
                f"nobody answers at {target} (orchestrator.target) within {patience_s:g} s; are the services up? "
                f"quartet up {file}"
            )

    async def infos(self, timeout_s: float) -> Infos:
        """Asks all four at once.

        Raises:
            ExceptionGroup: of the ServiceErrors of those that do not answer within `timeout_s`.
        """
        async with asyncio.TaskGroup() as group:
            rollout = group.create_task(self.rollout.info(timeout_s))
            reward = group.create_task(self.reward.info(timeout_s))
            reference = group.create_task(self.reference.info(timeout_s))
            critic = group.create_task(self.critic.info(timeout_s))
        return Infos(rollout.result(), reward.result(), reference.result(), critic.result())

    async def close(self) -> None:
        """Closes the channel."""
        await self.rollout.close()


def check_compatible(infos: Infos, tokenizer: Any, config: OrchestratorConfig) -> None:
    """Raises ConfigError unless every service uses the policy's tokens and takes what will be sent."""
    models = {
        "rollout": infos.rollout.model,
        "reward": infos.reward.model,
        "reference": infos.reference.model,
        "critic": infos.critic.model,
    }
    check_models(models, tokenizer, config)
    if infos.rollout.model.dtype != config.policy.dtype:
        raise ConfigError(
            f"orchestrator.policy.dtype: {config.policy.dtype}, but the rollout service has "
            f"{infos.rollout.model.dtype}; weights are pushed as they are, so both must be the same"
        )
    asked = config.weights.backend
    if asked not in ("auto", infos.rollout.weight_backend):
        raise ConfigError(
            f"orchestrator.weights.backend: {asked}, but the rollout replicas were started with "
            f"{infos.rollout.weight_backend}"
        )
    if config.weights.senders > 1 and infos.rollout.weight_backend == "nccl":
        raise ConfigError(
            f"orchestrator.weights.senders: {config.weights.senders}, but the rollout replicas were started with "
            "nccl, which takes one"
        )


def check_models(models: Mapping[str, common_pb2.ModelInfo], tokenizer: Any, config: OrchestratorConfig) -> None:
    """Raises ConfigError unless each service's model uses the policy's tokens and takes the longest pair."""
    expected = tokenizer_hash(tokenizer)
    longest = config.data.max_prompt_length + config.sampling.max_new_tokens
    for name, model in models.items():
        if model.tokenizer_hash != expected:
            raise ConfigError(
                f"{name}: the tokenizer of {model.path} is not that of orchestrator.policy.model "
                f"({config.policy.model}), so its token ids mean something else"
            )
        if model.max_length < longest:
            raise ConfigError(
                f"{name}: takes {model.max_length} tokens, but orchestrator.data.max_prompt_length + "
                f"orchestrator.sampling.max_new_tokens is {longest}"
            )
