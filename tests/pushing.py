"""Weight pushes from a plain model, and a vLLM engine without Serve to push to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.config import WeightsConfig
from orchestrator.weights import PushReport, WeightPusher
from protos import rollout_pb2 as pb
from services.common.arrays import Ints
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.sender import GlooSender
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.sample import Sample, Sampling

HOST = "127.0.0.1"
TIMEOUT_S = 20
BUCKET_BYTES = 100_000
"""The test models have 0.5 MB: several buckets."""


class ModelSource:
    """The learner's part of a push, for a model in this process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors: dict[str, Any] = dict(model.named_parameters())
        self._manifest = Manifest.of(self._tensors, BUCKET_BYTES)
        assert len(list(self._manifest.buckets())) > 2
        self._sender = GlooSender(HOST, TIMEOUT_S)
        self.fails = False
        """The next transfer breaks off after its first bucket."""

    async def rendezvous(self, backend: str) -> int:
        assert backend == "gloo"
        return self._sender.rendezvous()

    async def join(self, epoch: int, world_size: int) -> bytes:
        await asyncio.to_thread(self._sender.join, epoch, world_size)
        return self._manifest.pack()

    async def send(self) -> str:
        if not self.fails:
            return await asyncio.to_thread(self._sender.send, self._tensors, self._manifest)
        self.fails = False
        first = next(self._manifest.buckets())
        broken = dict.fromkeys(self._manifest.names[first.stop :])
        try:
            return await asyncio.to_thread(self._sender.send, self._tensors | broken, self._manifest)
        finally:
            self._sender.close()


async def push(rollout: Any, source: Any, version: int, attempts: int = 1) -> PushReport:
    """One push by a pusher that has never pushed before, as at the start of a run."""
    config = WeightsConfig(timeout_s=TIMEOUT_S, attempts=attempts)
    return await WeightPusher(rollout, source, "gloo", config).push(version)


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
        self._member = WeightMember(self._engine, "only", HOST, TIMEOUT_S)

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

    async def update_weights(self, timeout_s: float, **phase: Any) -> list[pb.WeightReport]:
        request = pb.WeightPhase(timeout_s=timeout_s, **phase)
        return [pb.WeightReport.FromString(await self._host.carry_out.remote(request.SerializeToString()))]
