"""The HTTP port of Serve's proxy, which is not opened, by Serve's own functions."""

import asyncio
import socket
import urllib.request
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private import default_impl, http_util
from ray.serve._private.proxy import ProxyActor
from ray.serve.config import HTTPOptions

from orchestrator.deployment.listeners import free_ports
from quartet.config.base import ConfigError
from quartet.serving.proxy import bind_to_host


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((default_impl, "add_grpc_address"), (http_util, "uvicorn")):
        monkeypatch.setattr(module, name, getattr(module, name))


async def _start(port: int) -> "asyncio.Task[Any]":
    """Starts the HTTP server by the function that Serve's actor has in its process, and lets it begin."""
    actor = cloudpickle.loads(cloudpickle.dumps(ProxyActor.__ray_metadata__.modified_class))  # type: ignore[attr-defined]
    start = actor.__mro__[1].__init__.__globals__["start_asgi_http_server"]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"reached"})

    options = HTTPOptions(host="127.0.0.1", port=port)
    running, _ = await start(app, options, event_loop=asyncio.get_running_loop(), enable_so_reuseport=False)
    assert not (await asyncio.wait([running], timeout=1))[0]
    return running  # type: ignore[no-any-return]


async def test_the_proxy_listens_nowhere_for_http() -> None:
    [port] = free_ports(1)
    running = await _start(port)
    assert await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}").read()) == b"reached"
    running.cancel()
    await asyncio.wait([running])
    [port] = free_ports(1)
    bind_to_host()
    running = await _start(port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    running.cancel()


@pytest.mark.parametrize(("module", "name"), [(default_impl, "add_grpc_address"), (http_util, "uvicorn")])
def test_a_serve_without_the_names_that_are_replaced_opens_no_port(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.delattr(module, name)
    with pytest.raises(ConfigError, match=f"{name}: this version of Serve does not have it"):
        bind_to_host()
