"""Names that must agree: gRPC services, applications, and the functions that Serve's proxy is told to call."""

import asyncio
import importlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import grpc
import pytest
import yaml
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve._private.proxy_router import ProxyRouter

from orchestrator.deployment.applications import SERVICES
from protos import critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from protos.rollout_pb2_grpc import RolloutStub, add_RolloutServicer_to_server
from quartet.config.base import ConfigError
from quartet.security.port import Port
from quartet.serving.door.port import PINGS, open_port
from quartet.serving.proxy import end_with_caller
from quartet.wire.client import OPTIONS
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient
from tests.unit.waiting import settled, until

ROOT = Path(__file__).parents[4]
FILES = (rollout_pb2, reward_pb2, reference_pb2, critic_pb2)
NAMES = ("Rollout", "Reward", "Reference", "Critic")
CLIENTS = (RolloutClient, RewardClient, ReferenceClient, CriticClient)


def services() -> list[Any]:
    return [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]


async def test_clients_name_the_applications_of_the_shipped_files() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert [client(channel).application for client in CLIENTS] == [name.lower() for name in NAMES]


def test_a_deployment_bears_the_name_of_its_service() -> None:
    """The proxy knows by this name which application serves what."""
    assert [f"quartet.v1.{service.deployment}" for service in SERVICES.values()] == [s.full_name for s in services()]


async def test_a_port_that_quartet_has_not_opened_is_refused() -> None:
    server = gRPCGenericServer(lambda **_: None)
    with pytest.raises(ConfigError, match="set RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH="):
        end_with_caller(Mock(), server)


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/*.yaml")), ids=lambda path: path.name)
def test_deployments_name_functions_and_applications_that_exist(path: Path) -> None:
    deployment = yaml.safe_load(path.read_text())
    names = {entry["name"] for entry in deployment["applications"]}
    assert names == (set(SERVICES) if "orchestrator" in deployment else {"reward"})
    functions = deployment["grpc_options"]["grpc_servicer_functions"]
    assert len(functions) == len(names) + 2
    # It acts on those that are added after it.
    assert functions[0] == "quartet.serving.proxy.end_with_caller"
    for function in functions:
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_port_lets_clients_ping_as_often_as_they_do() -> None:
    assert PINGS[1] < dict(OPTIONS)["grpc.keepalive_time_ms"]


MORE_THAN_GRPC_BUFFERS = 64 << 20


class Replica:
    """The replica's end of a stream, as Serve's proxy sees it: told of the caller's end while it is waited for."""

    def __init__(self) -> None:
        self.asked = 0
        self.ended = False

    def __aiter__(self) -> "Replica":
        return self

    async def __anext__(self) -> bytes:
        self.asked += 1
        if self.asked > 1:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True
        return bytes(MORE_THAN_GRPC_BUFFERS)


class Serving(NamedTuple):
    """Serve's proxy, as far as the port looks at it."""

    proxy_router: ProxyRouter
    factory: Any

    def make(self, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        return self.factory(service_method, streaming_type)


class Watch:
    """Notes how far the proxy has come with a stream."""

    def __init__(self, server: Any) -> None:
        self.writing = self.written = self.over = False
        self._make, server.service_handler_factory = server.service_handler_factory, self._factory

    def _factory(self, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        stream = self._make(service_method=service_method, streaming_type=streaming_type)

        async def watched(request: Any, context: Any) -> Any:
            context.add_done_callback(self._end)
            async for message in stream(request, context):
                self.writing = True
                yield message
                self.written = True

        return watched if streaming_type is gRPCStreamingType.UNARY_STREAM else stream

    def _end(self, _: Any) -> None:
        self.over = True


async def leave_while_written_to(replica: Replica, *before: Any) -> None:
    """A caller that reads nothing, so that the proxy is stuck writing to it, and then goes away.

    Returns when the proxy has noticed, and has told the replica if it does so at all.
    """

    def factory(service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def stream(request: Any, context: Any) -> Any:
            async for message in replica:
                yield message

        return stream

    router = ProxyRouter(lambda deployment, _: deployment)
    router.update_routes({DeploymentID("Rollout", "rollout"): EndpointInfo("/rollout")})
    server = gRPCGenericServer(Serving(router, factory).make)
    port = open_port(server, 0, Port(local="open"))
    for function in before:
        function(Mock(), server)
    watch = Watch(server)
    add_RolloutServicer_to_server(Mock(), server)  # type: ignore[no-untyped-call]
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = RolloutStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(rollout_pb2.GenerateRequest(), metadata=(("application", "rollout"),))
            await until(lambda: watch.writing)
            await settled()
            call.cancel()
            await until(lambda: watch.over)
            await settled()
            assert not watch.written
    finally:
        await server.stop(0)


async def test_a_caller_that_leaves_while_it_is_written_to_ends_the_replicas_stream() -> None:
    replica = Replica()
    await leave_while_written_to(replica, end_with_caller)
    assert replica.ended


async def test_serve_alone_does_not_tell_the_replica() -> None:
    """The reason for end_with_caller. Should this fail, Serve does it by itself now, and end_with_caller can go."""
    replica = Replica()
    await leave_while_written_to(replica)
    assert not replica.ended
