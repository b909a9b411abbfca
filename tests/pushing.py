"""Weight pushes from a plain model, and a vLLM engine without Serve to push to."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import torch

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.prover import BOUNDS, Prover
from orchestrator.push.pusher import PushReport, WeightPusher
from orchestrator.push.tolerance import Tolerance
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.memory.buckets import checksum
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.probe import probe_sequences
from quartet.wire.codec import Floats, Ints
from services.critic.client import CriticClient
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.models import MAX_LENGTH, WORDS
from tests.sources import HOST, LocalSource

TIMEOUT_S = 60
STALL_S = 20
BUCKET_BYTES = 100_000
"""The test models have 0.5 MB: several buckets."""


class ModelSource(LocalSource):
    """The learner's part of a push, for a model in this process: its weights but for those in `lacking`."""

    def __init__(
        self, model: torch.nn.Module, senders: int = 1, backend: str = "gloo", lacking: Collection[str] = ()
    ) -> None:
        tensors = {name: tensor for name, tensor in model.named_parameters() if name not in lacking}
        super().__init__(tensors, bucket_bytes=BUCKET_BYTES, stall_s=STALL_S, senders=senders, backend=backend)
        self._model = model
        assert self.buckets > 2

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first; [T - 1] for each sequence."""
        pairs = [(row[:1], row[1:]) for row in sequences]
        scored: list[Floats] = plain.logprobs(self._model, *zip(*pairs, strict=True))
        return scored


class TrainerSource:
    """The learner's part of a push, for a policy learner in this process."""

    def __init__(self, trainer: Any, backend: str = "gloo") -> None:
        self.trainer, self.backend, self.memberships = trainer, backend, 0

    async def places(self) -> list[Place]:
        """The place of the one sending rank."""
        return [self.trainer.sending.place()]

    async def rendezvous(self, backend: str) -> list[tuple[str, int]]:
        """The address and port of the one sending rank."""
        options = {"host": HOST, "bucket_bytes": BUCKET_BYTES, "stall_s": STALL_S}
        return [await asyncio.to_thread(self.trainer.sending.rendezvous, backend, **options)]

    async def manifest(self) -> bytes:
        """The packed manifest."""
        return bytes(await asyncio.to_thread(self.trainer.sending.manifest, BUCKET_BYTES))

    async def join(self, membership: int, world_size: int) -> None:
        """Forms the push group together with the replicas."""
        await asyncio.to_thread(self.trainer.sending.join, membership, world_size)

    async def gather(self, push: int) -> None:
        """Takes the weights of this push."""
        await asyncio.to_thread(self.trainer.sending.gather, push)

    async def send(self, push: int) -> str:
        """Sends the weights of this push; the checksum."""
        return checksum(await asyncio.to_thread(self.trainer.sending.send, push))

    async def abandon(self, membership: int) -> None:
        """Ends the transfer to a membership."""
        self.trainer.sending.abandon(membership)

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs by the learner, of all tokens but the first."""
        scored: list[Floats] = await asyncio.to_thread(self.trainer.score, sequences)
        return scored


def make_prover(source: Any) -> Prover:
    """Proves every push."""
    return Prover(source, probe_sequences(len(WORDS), MAX_LENGTH), Tolerance(*BOUNDS["float32"]), every=1)


def make_pusher(rollout: Any, source: Any, prover: Prover | None = None, **config: Any) -> WeightPusher:
    """A pusher that has never pushed before, as at the start of a run."""
    settings = {"timeout_s": TIMEOUT_S, "stall_s": STALL_S, "control_s": 2, "attempts": 1} | config
    backend = getattr(source, "backend", "gloo")  # a learner takes what the replicas have
    return WeightPusher(rollout, source, backend, WeightsConfig(**settings), prover)


async def push(rollout: Any, source: Any, version: int, **config: Any) -> PushReport:
    """One push by such a pusher."""
    if isinstance(rollout, RolloutClient):
        await hold(rollout)
    return await make_pusher(rollout, source, **config).push(version)


async def push_model(rollout: RolloutClient, model: torch.nn.Module) -> PushReport:
    """Brings all rollout replicas to the weights of `model`, under the next version."""
    reports = await hold(rollout)
    return await push(rollout, ModelSource(model), 1 + max(report.policy_version for report in reports))


async def hold(rollout: RolloutClient) -> list[pb.WeightReport]:
    """Takes the replicas for pushes by this client, even from another holder; their reports."""
    reports = await rollout.update_weights(TIMEOUT_S, discover=pb.Discover())
    newest = max(report.held.lease.number for report in reports)
    lease = common_pb2.Lease(run_id="pushing", number=newest + 1)
    # For no time: the next one need not wait.
    return await rollout.claim(lease, 0, TIMEOUT_S, take_over=True)


async def hold_critic(critic: CriticClient) -> None:
    """Takes the critic for this client's calls, even from another holder."""
    held = (await critic.info(TIMEOUT_S)).held
    lease = common_pb2.Lease(run_id="pushing", number=held.lease.number + 1)
    await critic.claim(lease, 0, TIMEOUT_S, take_over=True)


def perturbed(model: Any, seed: int) -> Any:
    """The model itself, every parameter moved by noise of half its own spread. Tied parameters stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


class EngineHost:
    """A rollout replica without Ray: an engine, and its part in pushes."""

    async def start(self, config: dict[str, Any]) -> None:
        """Loads the model."""
        from services.rollout.member import WeightMember
        from services.rollout.vllm.engine import VLLMEngine

        self._engine = await VLLMEngine.start(RolloutConfig.parse(config, "rollout"))
        self._member = WeightMember(self._engine, "only")

    async def generate(self, prompts: Sequence[Ints], sampling: Sampling) -> list[Sample]:
        """One sample for each prompt, by its index as the seed."""
        calls = [self._engine.generate(index, prompt, sampling, index) for index, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*calls))

    async def carry_out(self, phase: bytes) -> bytes:
        """Carries out one phase of a push; both ways as bytes."""
        report = await self._member.carry_out(pb.WeightPhase.FromString(phase))
        return bytes(report.SerializeToString())

    async def leave_open(self) -> None:
        """Opens a weight update in the engine of which its replica does not know."""
        await self._engine.llm.start_weight_update()

    async def shutdown(self) -> None:
        """Ends the engine's process."""
        self._engine.shutdown()


class Phases:
    """A RolloutClient for pushes to one engine, which it claims at first."""

    def __init__(self) -> None:
        self.lease = common_pb2.Lease()

    async def _carry_out(self, phase: bytes) -> bytes:
        raise NotImplementedError

    async def update_weights(
        self, timeout_s: float, members: Collection[str] = (), **phase: Any
    ) -> list[pb.WeightReport]:
        """Makes the one replica carry out a phase, as the client of the service does."""
        if not self.lease.run_id:
            report = await self._ask(TIMEOUT_S, discover=pb.Discover())
            self.lease = common_pb2.Lease(run_id="pushing", number=report.held.lease.number + 1)
            await self._ask(TIMEOUT_S, claim=common_pb2.Claim(ttl_s=0))
        return [await self._ask(timeout_s, **phase)]

    async def _ask(self, timeout_s: float, **phase: Any) -> pb.WeightReport:
        request = pb.WeightPhase(timeout_s=timeout_s, lease=self.lease, **phase)
        return pb.WeightReport.FromString(await self._carry_out(request.SerializeToString()))


class PushedHost(EngineHost, Phases):
    """Both in one process."""

    async def _carry_out(self, phase: bytes) -> bytes:
        return await self.carry_out(phase)
