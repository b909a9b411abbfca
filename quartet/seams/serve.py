"""Private names of Ray Serve: its gRPC proxy has no options for an address, an interceptor or its HTTP port, a
replica none for the address on which others reach it, and a broadcast loses all results if one is late."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from quartet.config.base import ConfigError

VERSIONS = ">=2.60,<2.61"
"""Versions of Ray."""

LARGEST_MESSAGE = 2 << 20
"""Most bytes of what a message between a proxy and a replica carries. gRPC refuses more than 4 MiB."""

HTTP_METHOD = "http"
"""Method of a deployment that answers requests over HTTP."""

Handler = Callable[[Any, Any], Any]


def open_ports_by(
    open_grpc: Callable[[Any, str, bool], None], http_server: Callable[..., Any], **options: Any
) -> None:
    """Makes the proxy of this process open its gRPC port by `open_grpc`, given the server, the address and whether
    other processes may share it, and serve HTTP by `http_server`, a class like uvicorn's Server, with these options
    of uvicorn's beside Serve's own.

    Raises:
        ConfigError: this version of Serve opens its ports by other functions.
    """
    from ray.serve._private import default_impl, http_util
    from ray.serve._private.proxy import SOCKET_REUSE_PORT_ENABLED

    # Names that Serve looks up when it opens a port. Its proxy's class is pickled by value, with the functions that
    # it had imported, so that replacing those has no effect.
    for module, name in ((default_impl, "add_grpc_address"), (http_util, "uvicorn")):
        if not hasattr(module, name):
            raise ConfigError(f"{module.__name__}.{name}: this version of Serve does not have it")
    default_impl.add_grpc_address = lambda server, address: open_grpc(server, address, SOCKET_REUSE_PORT_ENABLED)
    http_util.uvicorn = SimpleNamespace(Config=partial(http_util.uvicorn.Config, **options), Server=http_server)


def replace_core(server: Any, core: Any) -> None:
    """Gives Serve's gRPCGenericServer another core, which its class does not let callers give. No servicer may have
    been added before."""
    server._server = core


def service_names(server: Any) -> set[str]:
    """Full names of the services that were added to a gRPCGenericServer."""
    from ray.serve._private.grpc_util import get_service_names

    return set(get_service_names(server.generic_rpc_handlers))


def wrap_streams(server: Any, wrap: Callable[[Handler], Handler]) -> None:
    """Makes a gRPCGenericServer wrap the handlers that it makes from now on for methods with streams of replies."""
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    make = server.service_handler_factory

    def factory(service_method: str, streaming_type: Any) -> Any:
        handler = make(service_method=service_method, streaming_type=streaming_type)
        return wrap(handler) if streaming_type is gRPCStreamingType.UNARY_STREAM else handler

    server.service_handler_factory = factory


def asks_replica(server: Any, method: str) -> Handler:
    """A handler by which the proxy of a gRPCGenericServer sends a request to a replica, as a call of `method`, given
    as `/package.Service/Method`."""
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    handler: Handler = server.service_handler_factory(method, gRPCStreamingType.UNARY_UNARY)
    return handler


def running(server: Any) -> Callable[[], Iterable[tuple[str, str]]]:
    """Lists (application, ingress deployment) of all that runs, as the proxy to which a new gRPCGenericServer belongs
    knows it."""
    router = server.service_handler_factory.__self__.proxy_router
    return lambda: [(endpoint.app_name, endpoint.name) for endpoint in router.endpoints]


def route_of(app: Any) -> Callable[[str], tuple[str, str, str] | None]:
    """Finds (route prefix, application, ingress deployment) of a path, given the app that Serve hands a middleware;
    None for a path of no application."""
    router = app._app.proxy_router

    def find(path: str) -> tuple[str, str, str] | None:
        found = router.match_route(path)
        if found is None:
            return None
        prefix, handle, _ = found
        return prefix, handle.deployment_id.app_name, handle.deployment_id.name

    return find


def asks_over_http(app: Any, taken_s: float) -> Callable[..., AsyncGenerator[Any, None]]:
    """A function that has a replica of the application at a path stream an answer by HTTP_METHOD, an asynchronous
    generator; given the app that Serve hands a middleware, and the longest time, in seconds, until a replica has
    taken a request. Later than that it raises TimeoutError, where Serve waits until there is a replica.

    The function takes the path, a request's body, and what else the method gets; the method gets the route prefix
    before these. Each part of the answer is a message of the gRPC connection between this proxy and the replica.
    Closing the generator ends the method's.
    """
    from ray.serve import context

    proxy = app._app
    handles: dict[Any, tuple[Any, Any]] = {}

    def handle_of(base: Any, *, large: bool) -> Any:
        key = base.deployment_id, large
        of, handle = handles.get(key, (None, None))
        if of is not base:
            as_bytes = {"request_serialization": "pickle", "response_serialization": "pickle"}
            handle = base.options(method_name=HTTP_METHOD, stream=True, _by_reference=large, **as_bytes)
            handles[key] = base, handle
        return handle

    async def ask(path: str, body: bytes, *given: Any) -> AsyncGenerator[Any, None]:
        prefix, base, _ = proxy.proxy_router.match_route(path)
        # A large request goes as an object of Ray's, as a message to a replica may have 4 MiB.
        handle = handle_of(base, large=len(body) > LARGEST_MESSAGE)
        named = {"route": prefix, "app_name": base.deployment_id.app_name}
        context._serve_request_context.set(context._RequestContext(**named))  # for the replica's log and numbers
        answer = handle.remote(prefix, path, body, *given)
        # Serve ends a proxy that is to go when nothing is under way.
        proxy._ongoing_requests_start()
        try:
            async with asyncio.timeout(taken_s):
                await answer._fetch_future_result_async()
            async for part in answer:
                yield part
        except BaseException:
            answer.cancel()
            raise
        finally:
            proxy._ongoing_requests_end()

    return ask


def listen_on(host: str) -> None:
    """Makes the replica of this process listen on `host`, and not on every address, for calls between deployments.

    Serve opens that port after the deployment's constructor has returned, by a function that it has imported.
    """
    from ray.serve._private import replica

    open_port = replica.add_port_to_grpc_server
    address = f"[{host}]" if ":" in host else host

    def add_port_to_grpc_server(server: Any, everywhere: str) -> int:
        return int(open_port(server, f"{address}:{everywhere.rpartition(':')[2]}"))

    replica.add_port_to_grpc_server = add_port_to_grpc_server


async def answers_of_each(response: Any) -> Sequence[Awaitable[bytes]]:
    """The answers to a handle's broadcast, one for each replica that Serve knows. Serve's own collection of them
    loses all if one is late."""
    return [result.get_async() for result in await response._fetch_replica_results_async()]


def declare_context(call: Any) -> None:
    """Declares the parameter `grpc_context` of a function that functools.wraps another: Serve passes the context only
    to methods whose signature has it, and reads that of the wrapped one."""
    del call.__wrapped__
