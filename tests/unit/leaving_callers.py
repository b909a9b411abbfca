"""Callers that leave their streams early, at Serve's own gRPC proxy: prints how many the proxy outlived.

Run as a process of its own by test_call.py: what this looks for is a SIGSEGV.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy import gRPCProxy
from ray.serve._private.proxy_request_response import ResponseStatus
from ray.serve._private.proxy_router import ProxyRouter

from protos import rollout_pb2
from protos.rollout_pb2_grpc import RolloutStub, add_RolloutServicer_to_server
from quartet.security.port import Port
from quartet.serving.door.port import open_port
from quartet.serving.proxy import end_with_caller


class EndlessProxy(gRPCProxy):
    """Serve's proxy with an endless stream where the replica would be: no Ray runs here."""

    def setup_request_context_and_handle(self, app_name: str, handle: Any, **kwargs: Any) -> tuple[Any, str]:
        return handle, "request"

    async def send_request_to_replica(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield rollout_pb2.GenerateResponse().SerializeToString()
        except asyncio.CancelledError:
            yield ResponseStatus(code=grpc.StatusCode.CANCELLED, is_error=True, message="gone")


async def leave(port: int, how: str) -> None:
    """One stream that is left after its first message."""
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    metadata = (("application", "rollout"),)
    timeout = 0.05 if how == "deadline" else None
    stub = RolloutStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Generate(rollout_pb2.GenerateRequest(), metadata=metadata, timeout=timeout)
    try:
        async for _ in call:
            if how == "cancel":
                call.cancel()
            if how == "close":
                await channel.close()
    except (grpc.RpcError, asyncio.CancelledError):
        pass
    await channel.close()


async def main(count: int) -> None:
    logging.disable()
    router = ProxyRouter(lambda deployment, _: SimpleNamespace(deployment_id=deployment))
    router.update_routes({DeploymentID("Rollout", "rollout"): EndpointInfo("/rollout")})
    proxy = EndlessProxy("node", "127.0.0.1", True, router)
    server = gRPCGenericServer(proxy.service_handler_factory)
    port = open_port(server, 0, Port(local="open"))
    end_with_caller(Mock(), server)
    add_RolloutServicer_to_server(Mock(), server)  # type: ignore[no-untyped-call]
    await server.start()
    ways = ("cancel", "deadline", "close")
    for first in range(0, count, 10):
        await asyncio.gather(*(leave(port, ways[number % 3]) for number in range(first, first + 10)))
    async with asyncio.timeout(30):
        while proxy._ongoing_requests:
            await asyncio.sleep(0.01)
    print(f"outlived {count}, {proxy._ongoing_requests} still open")
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
