"""The seam with Ray Serve, against Serve's own classes. Ports: serving/door/test_no_http.py and test_port.py; the
replica's port: serving/test_replica_process.py."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve._private.replica import UserMethodInfo
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentResponseGenerator

from protos.reward_pb2_grpc import add_RewardServicer_to_server
from quartet.seams import serve


class Proxy:
    """Serve's proxy, as far as a server of its knows it."""

    def __init__(self) -> None:
        self.proxy_router = ProxyRouter(lambda deployment, _: deployment)
        self.made: list[tuple[str, gRPCStreamingType]] = []

    def factory(self, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        self.made.append((service_method, streaming_type))
        return f"handler of {service_method}"


@pytest.fixture
async def server() -> gRPCGenericServer:
    return gRPCGenericServer(Proxy().factory)


async def test_the_applications_that_run_are_those_of_the_proxys_router(server: gRPCGenericServer) -> None:
    running = serve.running(server)
    assert list(running()) == []
    router = server.service_handler_factory.__self__.proxy_router  # type: ignore[attr-defined]
    router.update_routes({DeploymentID("Rollout", "mine"): EndpointInfo("/rollout")})
    assert list(running()) == [("mine", "Rollout")]


async def test_streams_alone_are_wrapped(server: gRPCGenericServer) -> None:
    proxy: Proxy = server.service_handler_factory.__self__  # type: ignore[attr-defined]
    wrap: Any = lambda handler: ("wrapped", handler)  # noqa: E731
    serve.wrap_streams(server, wrap)
    make: Any = server.service_handler_factory
    assert make("/a/B", gRPCStreamingType.UNARY_STREAM) == ("wrapped", "handler of /a/B")
    assert serve.asks_replica(server, "/a/C") == "handler of /a/C"  # type: ignore[comparison-overlap]
    assert proxy.made[1] == ("/a/C", gRPCStreamingType.UNARY_UNARY)


async def test_services_that_were_added_are_named_and_go_to_the_new_core(server: gRPCGenericServer) -> None:
    taken: list[Any] = []
    core = SimpleNamespace(
        add_generic_rpc_handlers=taken.extend,
        add_registered_method_handlers=lambda handlers: None,
        is_running=lambda: False,
    )
    assert serve.service_names(server) == set()
    serve.replace_core(server, core)
    add_RewardServicer_to_server(Mock(), server)  # type: ignore[no-untyped-call]
    assert serve.service_names(server) == {"quartet.v1.Reward"}
    assert taken


def test_serve_names_each_replicas_answer_to_a_broadcast() -> None:
    assert asyncio.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)


def test_serve_tells_when_a_replica_has_taken_a_request() -> None:
    assert asyncio.iscoroutinefunction(DeploymentResponseGenerator._fetch_future_result_async)


@pytest.mark.parametrize("declared", [False, True])
def test_serve_gives_the_context_to_methods_that_declare_it(declared: bool) -> None:
    def method(self: Any, request: Any) -> None:
        """An RPC as a replica writes it."""

    @functools.wraps(method)
    def call(self: Any, request: Any, grpc_context: Any) -> None:
        """The same, decorated."""

    if declared:
        serve.declare_context(call)
    assert UserMethodInfo.from_callable(call, is_asgi_app=False).takes_grpc_context_kwarg is declared
