"""Serve's gRPC proxy offers any client health, reflection and clean errors, on a port of this machine only."""

import asyncio
import os
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from tests.cluster import Quartet, refused

NAMES = [f"quartet.v1.{name}" for name in ("Rollout", "Reward", "Reference", "Critic")]


@pytest.mark.parametrize("service", ["", *NAMES, "rollout", "critic"])
async def test_health_is_asked_by_service_and_without_metadata(quartet: Quartet, service: str) -> None:
    assert await quartet.health(service) == health_pb2.HealthCheckResponse.SERVING


async def test_health_of_an_unknown_service_is_not_found(quartet: Quartet) -> None:
    code, _ = await refused(quartet.health("quartet.v1.Nonet"))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(quartet: Quartet) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(quartet.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for reply in stub.ServerReflectionInfo(asked, timeout=30):
        names = {service.name for service in reply.list_services_response.service}
    assert names >= {*NAMES, "grpc.health.v1.Health"}


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("Rollout/Generate", rollout_pb2.GenerateRequest),
        ("Reward/Score", reward_pb2.ScoreRequest),
        ("Reference/Logprobs", reference_pb2.LogprobsRequest),
        ("Critic/Train", critic_pb2.TrainRequest),
    ],
)
async def test_bytes_that_are_not_a_message_are_refused(quartet: Quartet, method: str, request_type: type) -> None:
    application = method.partition("/")[0].lower()
    for garbage in (b"\xff\xff\xff", os.urandom(1000)):
        code, details = await refused(quartet.call(f"/quartet.v1.{method}", garbage, request_type, application))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "bytes that are not a message of the method's type" in details
    assert await quartet.health(application) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((), grpc.StatusCode.INVALID_ARGUMENT),
        ((("application", "nonet"),), grpc.StatusCode.NOT_FOUND),
        ((("application", "rollout"),), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
@pytest.mark.parametrize("method", ["Info", "Score"])
async def test_a_call_to_the_wrong_application_is_told_so_and_nothing_else(
    quartet: Quartet, metadata: tuple[tuple[str, str], ...], code: grpc.StatusCode, method: str
) -> None:
    """A replica without the method once answered with its trace, process id, address and paths."""
    ask = quartet.channel.unary_unary(f"/quartet.v1.Reward/{method}", lambda _: b"", reward_pb2.RewardInfo.FromString)
    actual, details = await refused(ask(None, metadata=metadata, timeout=30))
    assert actual is code
    assert details.startswith("metadata application: ")
    assert details.endswith("applications that serve quartet.v1.Reward: reward")


async def test_a_method_name_that_is_not_text_is_refused_and_all_services_go_on(quartet: Quartet) -> None:
    """Such a name once ended the proxy's gRPC server, for every service and without any proof of who called."""
    for name in (b"/\xff\xfe/Score", b"/quartet.v1.Reward/\xc3("):
        call = quartet.channel.unary_unary(name)(b"", timeout=30)  # type: ignore[arg-type]  # bytes pass as they are
        code, _ = await refused(call)
        assert code is grpc.StatusCode.UNIMPLEMENTED
    for service in NAMES:
        assert await quartet.health(service) == health_pb2.HealthCheckResponse.SERVING


async def test_hundreds_of_mistakes_leave_few_lines_in_the_logs(quartet: Quartet) -> None:
    """Serve alone writes 2.6 kB of traces for each, into files that are not rotated."""
    logs = [*Path(quartet.cluster.folder).glob("ray/session_2*/logs/worker-*.err")]
    before = sum(log.stat().st_size for log in logs)
    score = "/quartet.v1.Reward/Score", reward_pb2.ScoreRequest(), reward_pb2.ScoreResponse, "reward"
    for _ in range(10):
        calls = [refused(quartet.call(*score)) for _ in range(20)]
        assert {code for code, _ in await asyncio.gather(*calls)} == {grpc.StatusCode.INVALID_ARGUMENT}
    grown = sum(log.stat().st_size for log in logs) - before
    print(f"{grown / 200:.0f} bytes of log for each of 200 calls that failed")
    assert grown < 200 * 500
