"""Names that must agree: gRPC services, applications, and the functions that Serve's proxy is told to call."""

import asyncio
import importlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import yaml
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from protos import critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from protos.rollout_pb2_grpc import RolloutStub, add_RolloutServicer_to_server
from services.common.proxy import _APPLICATIONS, _ForApplication, end_with_caller
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient

ROOT = Path(__file__).parents[2]
FILES = (rollout_pb2, reward_pb2, reference_pb2, critic_pb2)
CLIENTS = (RolloutClient, RewardClient, ReferenceClient, CriticClient)


def services() -> list[Any]:
    return [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]


async def test_health_checks_and_clients_name_the_same_applications() -> None:
    assert sorted(_APPLICATIONS) == sorted(service.full_name for service in services())
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert [client(channel).application for client in CLIENTS] == list(_APPLICATIONS.values())


def test_a_health_check_is_sent_to_the_application_it_names() -> None:
    class FakeContext:
        peer = "someone"

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return (("application", "other"), ("trace", "1"))

    context = _ForApplication(FakeContext(), "reward")
    assert context.invocation_metadata() == (("trace", "1"), ("application", "reward"))
    assert context.peer == "someone"


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/*.yaml")), ids=lambda path: path.name)
def test_deployments_name_functions_and_applications_that_exist(path: Path) -> None:
    deployment = yaml.safe_load(path.read_text())
    assert {entry["name"] for entry in deployment["applications"]} == set(_APPLICATIONS.values())
    functions = deployment["grpc_options"]["grpc_servicer_functions"]
    assert len(functions) == len(FILES) + 2
    # It acts on those that are added after it.
    assert functions[0] == "services.common.proxy.end_with_caller"
    for function in functions:
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


class Replica:
    """The replica's end of a stream, as Serve's proxy sees it: told of the caller's end while it is waited for."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended = asyncio.Event()

    def __aiter__(self) -> "Replica":
        return self

    async def __anext__(self) -> bytes:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.ended.set()
            raise
        self.sent += 1
        return bytes(1 << 20)


async def leave_while_written_to(replica: Replica, *before: Any) -> None:
    """A caller that reads nothing, so that the proxy is stuck writing to it, and then goes away."""

    def factory(service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def stream(request: Any, context: Any) -> Any:
            async for message in replica:
                yield message

        return stream

    server = gRPCGenericServer(factory)
    port = server.add_insecure_port("127.0.0.1:0")
    for function in (*before, add_RolloutServicer_to_server):
        function(Mock(), server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = RolloutStub(channel).Generate(rollout_pb2.GenerateRequest())
            async with asyncio.timeout(10):
                while replica.sent < 2:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            call.cancel()
            await asyncio.sleep(0.5)
    finally:
        await server.stop(0)


async def test_a_caller_that_leaves_while_it_is_written_to_ends_the_replicas_stream() -> None:
    replica = Replica()
    await leave_while_written_to(replica, end_with_caller)
    assert replica.ended.is_set()


async def test_serve_alone_does_not_tell_the_replica() -> None:
    """What end_with_caller is there for. Should this fail, Serve does it by itself now, and that can go."""
    replica = Replica()
    await leave_while_written_to(replica)
    assert not replica.ended.is_set()
