"""The rollout deployment: translates between protobuf and the engine, and nothing else.

Import path for Serve: `services.rollout.replica:build`.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from protos import common_pb2
from protos import rollout_pb2 as pb
from services.common.arrays import Ints, unpack_longs, unpack_sequences
from services.common.errors import FailedPrecondition, InvalidArgument, translated, translated_stream
from services.common.replica import HealthMixin
from services.rollout.config import RolloutConfig
from services.rollout.fanout import broadcast
from services.rollout.interface import Engine
from services.rollout.sample import Sample, Sampling

HEARTBEAT_S = 2.0
"""How often a stream says something while no sample finishes, so that its caller can tell busy from stuck."""
LINGER_S = 0.05
"""How long a finished sample waits for others to share its message. Each message costs milliseconds on its way
through Serve, whatever it holds, and small models finish a sample with every engine step."""


@serve.deployment(
    name="Rollout",
    max_ongoing_requests=64,
    health_check_period_s=5,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
)
class Rollout(HealthMixin):
    """One replica, one engine."""

    async def __init__(self, config: RolloutConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        # Here and not above: Serve builds the application in a process that needs no engine, seconds sooner.
        # vLLM's logging set-up closes the handlers of everyone else in the process, Serve's among them; and a replica
        # whose log Serve's controller does not find is stopped when the controller recovers from its own death.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
        from services.common.identity import describe_model
        from services.rollout.engine import VLLMEngine
        from services.rollout.joining import catch_up
        from services.rollout.weights import WeightMember

        engine = await VLLMEngine.start(config)
        self._engine: Engine = engine
        context = serve.get_replica_context()
        self._replica = str(context.replica_tag)
        # One handle for good: each has a router of its own, which asks Serve's controller.
        self._everyone = serve.get_deployment_handle("Rollout", context.app_name)
        self._member = WeightMember(engine, self._replica, config.host)
        self._model = describe_model(
            config.model,
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_length=engine.max_length,
            dtype=config.dtype,
        )
        # Last: when this returns, Serve sends requests here.
        await catch_up(self._member, engine, self._replica, context.app_name, config.join_s)

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    async def check_health(self) -> None:
        """Serve restarts the replica when its engine is dead, or stuck in a push."""
        if self._member.failure:
            raise RuntimeError(self._member.failure)
        if not self._member.busy:  # in a push's phase, which has a deadline of its own, the engine answers nothing
            await self._engine.check_health()

    @translated_stream
    async def Generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """See rollout.proto."""
        self._check_version(request)
        prompts = unpack_sequences(request.prompts, "prompts", vocab_size=self._engine.vocab_size)
        sampling = Sampling.from_wire(request.sampling)
        seeds = _seeds(request.seeds, len(prompts))
        self._check_fit(prompts, sampling)
        async with contextlib.aclosing(_as_finished(self._engine, prompts, sampling, seeds)) as finished:
            async for samples in finished:
                yield pb.GenerateResponse(samples=[sample.to_wire() for sample in samples], replica=self._replica)

    def _check_version(self, request: pb.GenerateRequest) -> None:
        version = self._engine.version
        served = f"{self._replica} serves {version}"
        if version < request.min_version:
            raise FailedPrecondition(f"min_version: {request.min_version} asked, but {served}")
        if request.HasField("max_version") and version > request.max_version:
            raise FailedPrecondition(f"max_version: {request.max_version} asked, but {served}")

    def _check_fit(self, prompts: list[Ints], sampling: Sampling) -> None:
        if not prompts:
            raise InvalidArgument("prompts: empty; send at least one")
        longest = self._engine.max_length - sampling.max_new_tokens
        for index, prompt in enumerate(prompts):
            if len(prompt) > longest:
                raise InvalidArgument(
                    f"prompts[{index}]: {len(prompt)} tokens + sampling.max_new_tokens "
                    f"{sampling.max_new_tokens} exceed the model's max_length of {self._engine.max_length}"
                )
        for token in sampling.stop_token_ids:
            if not 0 <= token < self._engine.vocab_size:
                raise InvalidArgument(f"sampling.stop_token_ids: {token} is outside the vocabulary")

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.RolloutInfo:
        """See rollout.proto."""
        return pb.RolloutInfo(
            model=self._model,
            policy_version=self._engine.version,
            replica=self._replica,
            running=self._engine.running(),
            weights_checksum=self._engine.checksum,
            weight_backend=self._engine.backend,
            workers=self._engine.workers,
            checksums=self._engine.checksums,
        )

    @translated
    async def UpdateWeights(self, request: pb.WeightPhase) -> pb.WeightReports:
        """See rollout.proto: has every replica of the deployment carry out the phase, this one included."""
        if request.WhichOneof("phase") is None:
            raise InvalidArgument("phase: set one of discover, prepare, transfer, commit and abort")
        if not request.timeout_s > 0:
            raise InvalidArgument("timeout_s: required, more than 0")
        return pb.WeightReports(reports=await broadcast(self._everyone, "carry_out", request))

    async def carry_out(self, phase: bytes) -> bytes:
        """This replica's part of a push phase; called through the deployment's own handle only."""
        report = await self._member.carry_out(pb.WeightPhase.FromString(phase))
        return bytes(report.SerializeToString())


def _seeds(data: bytes, prompts: int) -> list[int | None]:
    if not data:
        return [None] * prompts
    seeds = unpack_longs(data, "seeds").tolist()
    if len(seeds) != prompts:
        raise InvalidArgument(f"seeds: {len(seeds)} for {prompts} prompts; send one each, or none")
    if negative := [index for index, seed in enumerate(seeds) if seed < 0]:
        # The engine would take -1 for no seed at all.
        raise InvalidArgument(f"seeds[{negative[0]}]: {seeds[negative[0]]}; must be 0 or more")
    return list(seeds)


async def _as_finished(
    engine: Engine,
    prompts: list[Ints],
    sampling: Sampling,
    seeds: list[int | None],
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncGenerator[list[Sample], None]:
    """Every sample once, each list holding those that finished since the last: at most one list in LINGER_S, and an
    empty one after `heartbeat_s` in which none did.

    However this ends (exhausted, cancelled, failed), no request of it is left in the engine.
    """
    pending = {
        asyncio.ensure_future(engine.generate(index, prompt, sampling, seed))
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    }
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield []
                continue
            if pending:
                more, pending = await asyncio.wait(pending, timeout=LINGER_S)
                done |= more
            failed = [error for task in done if (error := task.exception())]
            if samples := [task.result() for task in done if not task.exception()]:
                yield samples  # also beside a failure: what is finished need not be sampled again
            if failed:
                raise failed[0]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args:` of the YAML file."""
    return Rollout.bind(RolloutConfig.parse(args, "rollout.args"))  # type: ignore[attr-defined, no-any-return]
