"""The rollout deployment, which only translates between protobuf and the engine.

Import path for Serve: `services.rollout.replica:build`.
"""

import contextlib
import gc
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.security.port import Port
from quartet.serving.admission import MOST_ONGOING, Admission
from quartet.serving.desk import Desk
from quartet.serving.guests import Guests
from quartet.serving.health import HealthMixin
from quartet.serving.http import HttpMixin, refusal
from quartet.serving.replica_process import prepare_replica
from quartet.serving.replicas import answers_in_time, everyone
from quartet.serving.servicer import translated, translated_stream
from quartet.serving.share import Share
from quartet.serving.slots import EngineSlots
from quartet.wire.codec import PackedSequences
from quartet.wire.errors import FailedPrecondition, InvalidArgument
from quartet.wire.http_errors import HttpError
from quartet.wire.ragged import Ragged
from services.rollout.call import Call
from services.rollout.config import RolloutConfig
from services.rollout.engines import Start, completions, start
from services.rollout.fanout import broadcast
from services.rollout.http import Door, Served
from services.rollout.interface import check_least
from services.rollout.metrics import Line
from services.rollout.pulse import Pulse
from services.rollout.sample import Sampling, check_versions
from services.rollout.session_holder import HeldSessions

METRICS_S = 5.0
"""Seconds that each replica gets to give its metrics."""


@serve.deployment(
    name="Rollout",
    max_ongoing_requests=MOST_ONGOING,
    health_check_period_s=5,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
)
class Rollout(HealthMixin, HttpMixin):
    """One replica, one engine."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: RolloutConfig, start: Start = start
    ) -> None:
        """Starts the engine and joins the run that is active. `start` may start another than `config.engine`."""
        # Imported here because Serve builds the application in a process that then need not load torch.
        from quartet.wire.identity import describe_model
        from services.rollout.member import WeightMember
        from services.rollout.newcomer import catch_up

        prepare_replica()
        engine = self._engine = await start(config)
        self._admission = Admission(config.limits)
        context = serve.get_replica_context()
        self._replica = str(context.replica_tag)
        self._everyone = everyone()
        self._max_phase_s, self._adapter_versions = config.max_phase_s, config.adapter_versions
        self._member = WeightMember(engine, self._replica)
        gpus = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
        guests = Guests(config.foreign_share, lambda: self._member.held, gpus=gpus)
        self._slots = EngineSlots(config.max_num_seqs, config.limits, engine.max_length, guests)
        self._pulse = Pulse(engine.answer, lambda: self._member.busy)
        self._model = describe_model(
            config.model,
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_length=engine.max_length,
            dtype=config.dtype,
        )
        self._door = self._opened(config, context.app_name) if Port.of().http else None
        # Libraries and model stay until the end. Looking through them for garbage, to which an answer of many
        # log-probs drives Python, would hold all requests up.
        gc.freeze()
        # Comes last, because Serve sends requests as soon as this returns.
        await catch_up(self._member, engine, self._replica, context.app_name, config.join_s)

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    def _opened(self, config: RolloutConfig, application: str) -> Door | None:
        member = self._member
        served = Served(
            *(self._engine, self._admission, self._slots, lambda: member.run, self._pulse.beat),
            check=self._check_held,
            proved=lambda: member.proved,
        )
        made = completions(config, served)
        held, desk = HeldSessions(application, self._model.tokenizer_hash), Desk(config.limits)
        return Door(made, self.check_health, held, self._all_metrics, desk) if made else None

    async def _all_metrics(self) -> list[list[Line]]:
        """Metrics of all replicas that answer in time."""
        return await answers_in_time(self._everyone, "metrics", METRICS_S) or [await self.metrics()]

    async def metrics(self) -> list[Line]:
        """Metrics of this replica, labelled with its name; called only through the deployment's own handle."""
        lines: list[Line] = [
            ("policy_version", {}, self._engine.version),
            ("running_requests", {}, self._engine.running()),
            ("waiting_rows", {}, self._admission.waiting_rows),
        ]
        if (proof := self._member.proved) is not None:
            lines += [("proved_version", {}, proof.policy_version), ("proved_difference", {}, proof.difference)]
        lines += self._door.lines if self._door else ()
        return [(name, {"replica": self._replica, **labels}, number) for name, labels, number in lines]

    async def answer(self, request: Request) -> Response:
        """Answers a request over HTTP, which Serve's proxy passes on only where the port is open."""
        if self._door is None:
            return refusal(HttpError(501, "the engine of this application does not speak OpenAI's protocol"))
        return await self._door.answer(request)

    async def check_health(self) -> None:
        """Raises if the engine is dead or stuck in a push; Serve then restarts the replica."""
        if self._member.failure:
            raise RuntimeError(self._member.failure)
        if not self._member.busy:  # during a phase, which has its own deadline, the engine does not answer
            await self._engine.check_health()

    @translated_stream
    async def Generate(self, request: pb.GenerateRequest, share: Share) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Samples one response per prompt and streams the samples as they finish."""
        self._check_held(request)
        sampling = Sampling.from_wire(request.sampling)
        self._check_sampling(sampling)
        asked, begun = PackedSequences.of(request.prompts), PackedSequences.of(request.begun)
        tokens = asked.tokens + asked.rows * sampling.max_new_tokens
        with self._admission.admitted(share, asked.rows, tokens, "prompts"):
            prompts = asked.unpack("prompts", vocab_size=self._engine.vocab_size)
            self._check_fit(prompts, sampling)
            given = begun.unpack("begun", vocab_size=self._engine.vocab_size, allow_empty=True)
            call = Call(self._engine, prompts, sampling, request.seeds, given)
            self._pulse.beat()
            async with contextlib.aclosing(call.answers(self._slots, share, self._pulse.beat)) as answers:
                async for answer in answers:
                    answer.replica = self._replica
                    yield answer

    def _check_held(self, request: pb.GenerateRequest) -> None:
        """Raises unless the lease of the request holds this replica, which serves one of its versions: a run that was
        taken over gets no more samples. Calls that name no version need no lease."""
        if request.HasField("lease") or request.min_version or request.HasField("max_version"):
            self._member.check(request.lease)
        check_versions(request)
        version = self._engine.version
        if request.HasField("lease"):  # versions of two timelines are not compared
            self._member.at.check(request.lease.number, self._replica, "version")
        served = f"{self._replica} serves {version}"
        if version < request.min_version:
            raise FailedPrecondition(f"min_version: {request.min_version} asked, but {served}")
        if request.HasField("max_version") and version > request.max_version:
            raise FailedPrecondition(f"max_version: {request.max_version} asked, but {served}")

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.max_new_tokens > self._engine.max_length:
            raise InvalidArgument(
                f"sampling.max_new_tokens: {sampling.max_new_tokens}; must be at most the model's max_length, "
                f"{self._engine.max_length}"
            )
        for token in sampling.stop_token_ids:
            if not 0 <= token < self._engine.vocab_size:
                raise InvalidArgument(f"sampling.stop_token_ids: {token} is outside the vocabulary")
        check_least(sampling.min_new_tokens, self._engine, "sampling.min_new_tokens")

    def _check_fit(self, prompts: Ragged, sampling: Sampling) -> None:
        if not len(prompts):
            raise InvalidArgument("prompts: empty; send at least one")
        long = prompts.lengths > self._engine.max_length - sampling.max_new_tokens
        if long.any():
            index = int(long.argmax())
            raise InvalidArgument(
                f"prompts[{index}]: {len(prompts[index])} tokens + sampling.max_new_tokens "
                f"{sampling.max_new_tokens} exceed the model's max_length of {self._engine.max_length}"
            )

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.RolloutInfo:
        """Describes the model, its version and this replica's load."""
        return pb.RolloutInfo(
            model=self._model,
            policy_version=self._engine.version,
            replica=self._replica,
            running=self._engine.running(),
            weights_checksum=self._engine.checksum,
            weight_backend=self._engine.backend,
            workers=self._engine.workers,
            checksums=self._engine.checksums,
            timeline=self._member.at.timeline,
            adapter_versions=self._adapter_versions,
        )

    @translated
    async def UpdateWeights(self, request: pb.WeightPhase) -> pb.WeightReports:
        """Makes every replica of the deployment, including this one, carry out one phase of a push."""
        if request.WhichOneof("phase") is None:
            raise InvalidArgument(
                "phase: set one of discover, claim, rest, prepare, transfer, commit, abort and probe"
            )
        if not 0 < request.timeout_s <= self._max_phase_s:
            raise InvalidArgument(
                f"timeout_s: {request.timeout_s:g}; required, more than 0 and at most the replicas' max_phase_s, "
                f"{self._max_phase_s:g}"
            )
        if not 0 <= request.prepare.stall_s <= request.timeout_s:
            raise InvalidArgument(
                f"prepare.stall_s: {request.prepare.stall_s:g}; must be 0 or more and at most timeout_s, "
                f"{request.timeout_s:g}"
            )
        return pb.WeightReports(reports=await broadcast(self._everyone, request))

    async def carry_out(self, phase: bytes) -> bytes:
        """Carries out this replica's part of a phase; called only through the deployment's own handle."""
        report = await self._member.carry_out(pb.WeightPhase.FromString(phase))
        return bytes(report.SerializeToString())


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args:` of the YAML file."""
    return Rollout.bind(RolloutConfig.parse(args, "rollout.args"))  # type: ignore[attr-defined, no-any-return]
