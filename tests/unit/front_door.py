"""Serve's own gRPC server in this process, opened as Quartet opens it, with recording replicas behind it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import yaml
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.grpc_util import start_grpc_server
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.config import gRPCOptions

from quartet.security.credentials import VARIABLE, connect
from quartet.security.identity import Caller, Role, caller_of
from quartet.security.keys.folder import Keys
from quartet.security.port import Port

CALLERS: dict[str, Role] = {"run-a": "trainer", "client": "sampler", "evaluator": "judge-client", "pager": "prober"}
APPLICATIONS = {"rollout": "Rollout", "reward": "Reward", "reference": "Reference", "critic": "Critic"}
ANSWER_S = 60
"""Deadline of a call in seconds: for what would hang otherwise, on a machine of any speed."""
FUNCTIONS = [
    "quartet.serving.proxy.end_with_caller",
    "protos.rollout_pb2_grpc.add_RolloutServicer_to_server",
    "protos.reward_pb2_grpc.add_RewardServicer_to_server",
    "protos.reference_pb2_grpc.add_ReferenceServicer_to_server",
    "protos.critic_pb2_grpc.add_CriticServicer_to_server",
    "quartet.serving.proxy.add_health",
]


@dataclass
class Replicas:
    """Stands where Serve's proxy would send a call to a replica; answers with an empty message."""

    router: Any
    seen: list[tuple[str, Caller, tuple[tuple[str, Any], ...]]] = field(default_factory=list)
    """Method, caller and metadata of each call that got here."""
    failure: tuple[grpc.StatusCode, str] | None = None
    """Status with which calls end, as Serve would end them."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, unless calls are to wait."""

    def __post_init__(self) -> None:
        self.released.set()

    @property
    def proxy_router(self) -> Any:
        return self.router

    def make(self, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            self._note(service_method, context)
            await self.released.wait()
            return b""

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            self._note(service_method, context)
            yield b""

        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else unary

    def _note(self, method: str, context: Any) -> None:
        self.seen.append((method, caller_of(context), tuple(context.invocation_metadata())))
        if self.failure:
            context.set_code(self.failure[0])
            context.set_details(self.failure[1])


@asynccontextmanager
async def front_door(
    port: Port,
    applications: Mapping[str, str] = APPLICATIONS,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[str, Replicas]]:
    """Target and replicas of a server that Serve's own function starts."""
    from ray.serve._private import default_impl

    from quartet.serving.door.port import open_port

    router = ProxyRouter(lambda deployment, _: SimpleNamespace(deployment_id=deployment))
    router.update_routes(
        {DeploymentID(deployment, name): EndpointInfo(f"/{name}") for name, deployment in applications.items()}
    )
    replicas, numbers = Replicas(router), []
    before = default_impl.add_grpc_address
    default_impl.add_grpc_address = lambda server, _: numbers.append(open_port(server, 0, port, clock=clock))
    try:
        options = gRPCOptions(port=1, grpc_servicer_functions=FUNCTIONS)
        loop = asyncio.get_running_loop()
        running, server = await start_grpc_server(replicas.make, options, event_loop=loop)
    finally:
        default_impl.add_grpc_address = before
    try:
        yield f"{port.host}:{numbers[0]}", replicas
    finally:
        await server.stop(0)
        await running


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call, unary or streamed."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


def ask(channel: grpc.aio.Channel, method: str, *metadata: tuple[str, str], request: bytes = b"") -> Any:
    """A call of raw bytes, to the application that bears the service's name unless `metadata` is given."""
    service, name = method.split("/")
    application = (("application", service.lower()),)
    make = channel.unary_stream if name == "Generate" else channel.unary_unary
    return make(f"/quartet.v1.{method}")(request, metadata=metadata or application, timeout=ANSWER_S)


def made_keys(
    folder: Path, callers: Mapping[str, Role] = CALLERS, *, tokens: bool = False, days: int = 1, **limits: object
) -> Keys:
    """Keys of these callers, and of a server on 127.0.0.1, under a policy with these limits."""
    keys = Keys(folder, days=days)
    keys.make(["127.0.0.1"], callers, tokens=tokens)
    if limits:
        policy = yaml.safe_load(keys.policy.read_text())
        keys.policy.write_text(yaml.safe_dump(policy | {"limits": limits}))
    return keys


def channel_of(keys: Keys, name: str, target: str) -> grpc.aio.Channel:
    """A channel with the credentials that the keys hold for the caller `name`."""
    return connect(target, {VARIABLE: str(keys.folder / "clients" / name)})


def edit_identity(policy: Path, name: str, **values: object) -> None:
    """Sets fields of an identity in a policy file."""
    loaded = yaml.safe_load(policy.read_text())
    loaded["identities"][name] |= values
    policy.write_text(yaml.safe_dump(loaded))
