"""The four replicas as they are, around models that sleep. `args:` of each hold `pace`, the file of a Pace, and
`batch`, the number of responses in a batch."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray import serve

from benchmarks.emulated.pace import PROMPT, RESPONSE, Pace
from protos import common_pb2, reward_pb2
from protos import rollout_pb2 as pb
from services.common.config.limits import LimitsConfig
from services.common.serving.admission import MOST_ONGOING, Admission
from services.common.serving.batcher import Batcher
from services.common.serving.replica_process import prepare_replica
from services.common.serving.slots import EngineSlots
from services.common.wire.codec import Ints
from services.common.wire.errors import FailedPrecondition
from services.critic.replica import Critic
from services.reference.replica import Reference
from services.reward.encoding import Encoder, Received
from services.reward.replica import Reward
from services.rollout.replica import Rollout
from services.rollout.sample import FinishReason, Sample, Sampling

VOCABULARY, LONGEST = 64, 256
MODEL = common_pb2.ModelInfo(path="emulated", vocab_size=VOCABULARY, max_length=LONGEST, dtype="float32")
LIMITS = LimitsConfig()


class Sleep:
    """Sleeps for as long as a part takes by the present pace."""

    def __init__(self, args: dict[str, Any]) -> None:
        """`args` are those of an application."""
        self._file, self.batch = Path(args["pace"]), int(args["batch"])

    async def __call__(self, part: str, rows: int | None = None) -> None:
        """Sleeps for a whole batch, or for so many rows' share of it."""
        share = 1.0 if rows is None else rows / self.batch
        await asyncio.sleep(share * getattr(Pace.read(self._file), part))


class Engine:
    """An engine that takes its time for each response, with room for one batch."""

    vocab_size, max_length = VOCABULARY, LONGEST
    backend, workers, checksum = "gloo", 1, ""

    def __init__(self, sleep: Sleep) -> None:
        self.version = 0
        self.checksums: dict[int, str] = {}
        self._sleep, self._room = sleep, asyncio.Semaphore(sleep.batch)
        self._running = 0

    async def generate(
        self, index: int, prompt_ids: Ints, sampling: Sampling, seed: int | None, *rest: Any
    ) -> Sample:
        """A response, the halves of which were sampled by the versions at its beginning and at its end."""
        self._running += 1
        try:
            async with self._room:
                first = self.version
                await self._sleep("generate")
        finally:
            self._running -= 1
        spans: tuple[tuple[int, int, int], ...] = ((first, 0, RESPONSE),)
        if self.version != first:
            spans = ((first, 0, RESPONSE // 2), (self.version, RESPONSE // 2, RESPONSE))
        ids = np.full(RESPONSE, 4 + (seed or 0) % 60, np.int32)
        return Sample(index, ids, np.full(RESPONSE, -1.0, np.float32), FinishReason.LENGTH, spans)

    def running(self) -> int:
        """Unfinished requests."""
        return self._running

    def shutdown(self) -> None:
        """Nothing runs."""


class Member:
    """A replica's part in a push, of which only the commit is left. Any lease and any timeline will do."""

    timeline, failure, busy = 0, "", True

    def __init__(self, engine: Engine, replica: str) -> None:
        self._engine, self._replica = engine, replica
        self.at = self

    def check(self, *_: Any) -> None:
        """Accepts a lease, or a timeline."""

    async def carry_out(self, phase: pb.WeightPhase) -> pb.WeightReport:
        """Stamps later samples with the version of a commit."""
        self._engine.version = phase.commit.policy_version
        return pb.WeightReport(replica=self._replica, ok=True, policy_version=self._engine.version)


class EmulatedRollout(Rollout.func_or_class):  # type: ignore[misc, name-defined]
    """A rollout replica around Engine."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_replica()
        context, sleep = serve.get_replica_context(), Sleep(args)
        self._replica = str(context.replica_tag)
        self._everyone = serve.get_deployment_handle("Rollout", context.app_name)
        self._engine = Engine(sleep)
        self._member = Member(self._engine, self._replica)
        self._admission, self._slots = Admission(LIMITS), EngineSlots(sleep.batch, LIMITS, quantum=LONGEST)
        self._max_phase_s, self._model = 60.0, MODEL


class Batched:
    """Health of a replica around a batcher."""

    _batcher: Batcher[Any, Any]

    async def check_health(self) -> None:
        """Raises if a pass has exceeded its deadline."""
        self._batcher.check()


class EmulatedReward(Batched, Reward.func_or_class):  # type: ignore[misc, name-defined]
    """A reward replica whose scores follow from the response's first token."""

    def __init__(self, args: dict[str, Any]) -> None:
        prepare_replica()
        sleep = Sleep(args)

        async def score(pairs: Sequence[Any]) -> Any:
            await sleep("score", len(pairs))
            return np.asarray([pair.response_ids[0] % 7 for pair in pairs], np.float32)

        self._admission, self._received = Admission(LIMITS), Received
        self._batcher = batcher(score, sleep)
        self._encoder = Encoder(None, VOCABULARY, LONGEST, texts=False)
        self._scorer, self._model = reward_pb2.ScorerIdentity(name="function:emulated", model_hash="none"), MODEL


class EmulatedReference(Batched, Reference.func_or_class):  # type: ignore[misc, name-defined]
    """A reference replica whose log-probs are all the same."""

    def __init__(self, args: dict[str, Any]) -> None:
        prepare_replica()
        sleep = Sleep(args)

        async def logprobs(responses: Sequence[Ints]) -> list[Any]:
            await sleep("reference", len(responses))
            return [np.full(len(response), -1.5, np.float32) for response in responses]

        self._admission, self._batcher = Admission(LIMITS), batcher(logprobs, sleep)
        self._question, self._distribution, self._model = _response, SimpleNamespace, MODEL


class EmulatedCritic(Batched, Critic.func_or_class):  # type: ignore[misc, name-defined]
    """A critic replica whose training sleeps; values wait for it."""

    def __init__(self, args: dict[str, Any]) -> None:
        prepare_replica()
        self._config, self._batch = SimpleNamespace(model="emulated"), SimpleNamespace
        sleep = Sleep(args)
        self._critic = CriticModel(sleep)
        self._admission, self._train_admission = Admission(LIMITS), Admission(LIMITS)
        self._batcher = batcher(self._critic.values, sleep, turn=self._critic.turn)
        self._model = MODEL


class CriticModel:
    """A critic that knows how many steps it has trained."""

    timeline = 0

    def __init__(self, sleep: Sleep) -> None:
        self.last_step = 0
        self.turn = asyncio.Lock()
        self.fence = SimpleNamespace(held=common_pb2.Held)
        self._sleep = sleep

    def expect(self, lease: Any, least: int | None) -> int:
        """The last step. FailedPrecondition if it is below `least`."""
        if self.last_step < (least or 0):
            raise FailedPrecondition(f"min_step: {least} asked, but {self.last_step} are trained")
        return self.last_step

    def expect_ranks(self) -> None:
        """Nothing can have died."""

    def stop(self) -> None:
        """Nothing runs."""

    async def values(self, pairs: Sequence[tuple[Ints, Ints]]) -> list[Any]:
        """Values that are not all the same."""
        await self._sleep("values", len(pairs))
        return [np.linspace(0, 1, len(response), dtype=np.float32) for _, response in pairs]

    async def train(self, lease: Any, step: int, *_: Any, **__: Any) -> dict[str, float]:
        """Counts a step."""
        async with self.turn:
            await self._sleep("train_critic")
            self.last_step = step
        return {"loss": 0.0}


def batcher(run: Any, sleep: Sleep, **options: Any) -> Batcher[Any, Any]:
    """A batcher whose passes hold a batch at most."""
    return Batcher(run, batch_tokens=sleep.batch * (PROMPT + RESPONSE), batch_s=LIMITS.batch_s, **options)


def _response(prompt: Ints, response: Ints, asked: Any) -> Ints:
    return response


_REPLICAS = {
    "rollout": EmulatedRollout,
    "reward": EmulatedReward,
    "reference": EmulatedReference,
    "critic": EmulatedCritic,
}


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application of the service that `args` names."""
    deployment = serve.deployment(
        name=str(args["service"]).capitalize(),
        max_ongoing_requests=MOST_ONGOING,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=1,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployment(_REPLICAS[args["service"]]).bind(args)
