"""What Serve's gRPC proxy offers to any client: health, reflection, clean errors, a port of this machine only."""

import os

import grpc
import psutil
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


def test_the_grpc_port_listens_on_loopback_only(quartet: Quartet) -> None:
    port = quartet.raw["grpc_options"]["port"]
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    hosts = {address.ip.removeprefix("::ffff:") for address in listening if address and address.port == port}
    assert hosts == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("Rollout/Generate", rollout_pb2.GenerateRequest),
        ("Reward/Score", reward_pb2.ScoreRequest),
        ("Reference/Logprobs", reference_pb2.LogprobsRequest),
        ("Critic/Train", critic_pb2.TrainRequest),
    ],
)
async def test_bytes_that_are_no_message_are_refused(quartet: Quartet, method: str, request_type: type) -> None:
    application = method.partition("/")[0].lower()
    for garbage in (b"\xff\xff\xff", os.urandom(1000)):
        code, details = await refused(quartet.call(f"/quartet.v1.{method}", garbage, request_type, application))
        assert code is grpc.StatusCode.UNKNOWN
        assert "Error parsing message" in details
    assert await quartet.health(application) == health_pb2.HealthCheckResponse.SERVING


async def test_a_call_without_an_application_is_told_so(quartet: Quartet) -> None:
    ask = quartet.channel.unary_unary("/quartet.v1.Reward/Info", lambda _: b"", reward_pb2.RewardInfo.FromString)
    code, details = await refused(ask(None, timeout=30))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "application" in details
