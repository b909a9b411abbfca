"""The HTTP door of a replica: whose share a request has, and what becomes of errors."""

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.errors import ResourceExhausted, ServiceError
from services.rollout.http import Door


class Completions:
    """Notes what it is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[str, bytes, Share]] = []

    async def answer(self, path: str, body: bytes, share: Share) -> Response:
        self.asked.append((path, body, share))
        if self.error:
            raise self.error
        return JSONResponse({})

    async def models(self) -> Any:
        return {"data": []}

    async def tokenizer_info(self) -> Any:
        return {"eos_token": "<eos>"}


async def well() -> None:
    """Raises nothing."""


async def ill() -> None:
    raise RuntimeError("/home/me: stuck")


def request(path: str, body: bytes = b"", **headers: str) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": f"/rollout{path}", "root_path": "/rollout", "headers": sent}
    return Request(scope, receive)


@pytest.mark.parametrize(
    ("headers", "share"),
    [
        ({}, Share("anonymous", Purpose.FOREIGN)),
        ({"quartet_run": "eval"}, Share("eval", Purpose.FOREIGN)),
        ({"quartet_identity": "me", "quartet_role": "trainer"}, Share("me", Purpose.FOREIGN)),
        (
            {"quartet_identity": "me", "quartet_role": "trainer", "quartet_purpose": "evaluation"},
            Share("me", Purpose.EVALUATION),
        ),
        (
            {"quartet_identity": "me", "quartet_role": "trainer", "quartet_purpose": "training"},
            Share("me", Purpose.EVALUATION),
        ),
        (
            {"quartet_identity": "me", "quartet_role": "sampler", "quartet_purpose": "evaluation"},
            Share("me", Purpose.FOREIGN),
        ),
    ],
)
async def test_a_request_waits_in_its_callers_share_and_never_as_training(
    headers: dict[str, str], share: Share
) -> None:
    completions = Completions()
    got = await Door(completions, well).answer(request("/v1/completions", b"{}", **headers))
    assert got.status_code == 200
    assert completions.asked == [("/v1/completions", b"{}", share)]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ResourceExhausted("prompt: full", 3), 429, "prompt: full"),
        (ServiceError("broken"), 500, "broken"),
        (ValueError("/home/me/secret"), 500, "internal error (ValueError); see the log"),
    ],
)
async def test_errors_are_answers(error: Exception, status: int, message: str) -> None:
    got = await Door(Completions(error), well).answer(request("/v1/chat/completions"))
    assert (got.status_code, json.loads(bytes(got.body))["error"]["message"]) == (status, message)


async def test_health_is_the_replicas() -> None:
    assert (await Door(Completions(), well).answer(request("/health"))).status_code == 200
    got = await Door(Completions(), ill).answer(request("/health"))
    assert got.status_code == 503
    assert b"/home/me" not in bytes(got.body)
