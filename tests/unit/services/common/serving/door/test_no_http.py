"""The HTTP port of Serve's proxy, by Serve's own check of its middlewares and by Starlette's own client."""

import pytest
from ray.serve._private import default_impl
from ray.serve._private.http_util import validate_http_proxy_callback_return
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from services.common.serving.proxy import bind_to_host


def middlewares(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    given = bind_to_host()
    validate_http_proxy_callback_return(given)
    return given


def test_no_request_over_http_reaches_an_application(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        reached.append(scope["type"])

    wrapped = Starlette(middleware=middlewares(monkeypatch))  # type: ignore[arg-type]
    wrapped.mount("/", app)
    client = TestClient(wrapped)
    for method in ("GET", "POST", "OPTIONS"):
        answer = client.request(method, "/reward")
        assert (answer.status_code, answer.text) == (404, "the services answer over gRPC only\n")
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/reward"):
        pass
    assert reached == []
