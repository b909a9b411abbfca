"""Weight pushes from a plain model, and a vLLM engine without Serve to push to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.config import WeightsConfig
from orchestrator.weights import PushReport, WeightPusher
from protos import rollout_pb2 as pb
from services.common.arrays import Ints
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.sample import Sample, Sampling
from tests.sources import HOST, LocalSource

TIMEOUT_S = 20
STALL_S = 5
BUCKET_BYTES = 100_000
"""The test models have 0.5 MB: several buckets."""


class ModelSource(LocalSource):
    """The learner's part of a push, for a model in this process."""

    def __init__(self, model: torch.nn.Module, senders: int = 1, backend: str = "gloo") -> None:
        tensors = dict(model.named_parameters())
        super().__init__(tensors, bucket_bytes=BUCKET_BYTES, stall_s=STALL_S, senders=senders, backend=backend)
        assert self.buckets > 2


def make_pusher(rollout: Any, source: Any, **config: Any) -> WeightPusher:
    """A pusher that has never pushed before, as at the start of a run."""
    settings = {"timeout_s": TIMEOUT_S, "stall_s": STALL_S, "control_s": 2, "attempts": 1} | config
    backend = getattr(source, "backend", "gloo")  # a learner takes what the replicas have
    return WeightPusher(rollout, source, backend, WeightsConfig(**settings))


async def push(rollout: Any, source: Any, version: int, **config: Any) -> PushReport:
    """One push by such a pusher."""
    return await make_pusher(rollout, source, **config).push(version)


async def push_model(rollout: RolloutClient, model: torch.nn.Module) -> PushReport:
    """Brings all rollout replicas to the weights of `model`, under the next version."""
    reports = await rollout.update_weights(TIMEOUT_S, discover=pb.Discover())
    return await push(rollout, ModelSource(model), 1 + max(report.policy_version for report in reports))


def perturbed(model: Any, seed: int) -> Any:
    """The model itself, every parameter moved by noise of half its own spread. Tied parameters stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


class EngineHost:
    """What a rollout replica holds, in a Ray actor and without Serve: an engine, and its part in pushes."""

    async def start(self, config: dict[str, Any]) -> None:
        """Loads the model."""
        from services.rollout.engine import VLLMEngine
        from services.rollout.weights import WeightMember

        self._engine = await VLLMEngine.start(RolloutConfig.parse(config, "rollout"))
        self._member = WeightMember(self._engine, "only", HOST)

    async def generate(self, prompts: Sequence[Ints], sampling: Sampling) -> list[Sample]:
        """One sample for each prompt, by its index as the seed."""
        calls = [self._engine.generate(index, prompt, sampling, index) for index, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*calls))

    async def carry_out(self, phase: bytes) -> bytes:
        """As Rollout.carry_out."""
        report = await self._member.carry_out(pb.WeightPhase.FromString(phase))
        return bytes(report.SerializeToString())

    async def shutdown(self) -> None:
        """Ends the engine's process."""
        self._engine.shutdown()


class OneEngine:
    """A RolloutClient for pushes to one EngineHost."""

    def __init__(self, host: Any) -> None:
        self._host = host

    async def update_weights(self, timeout_s: float, members: Any = (), **phase: Any) -> list[pb.WeightReport]:
        request = pb.WeightPhase(timeout_s=timeout_s, **phase)
        return [pb.WeightReport.FromString(await self._host.carry_out.remote(request.SerializeToString()))]
