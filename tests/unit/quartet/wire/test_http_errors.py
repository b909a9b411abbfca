"""Errors over HTTP: the status that a client acts on, and the form that OpenAI's clients read."""

import json

import pytest

from quartet.wire import errors
from quartet.wire.http_errors import http_error

KINDS = {
    errors.InvalidArgument: (400, "invalid_request_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.PermissionDenied: (403, "permission_error"),
    errors.NotFound: (404, "not_found_error"),
    errors.LeaseLost: (409, "invalid_request_error"),
    errors.Unavailable: (503, "server_error"),
    errors.DeadlineExceeded: (504, "server_error"),
    errors.Internal: (500, "server_error"),
    errors.NotFinite: (500, "server_error"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_has_its_status(kind: type[errors.ServiceError]) -> None:
    answer = http_error(kind("prompt: wrong"), "prompt")
    status, name = KINDS[kind]
    told = {"message": "prompt: wrong", "type": name, "param": "prompt", "code": status}
    assert (answer.status, json.loads(answer.body)) == (status, {"error": told})
    assert answer.headers["content-type"] == "application/json"
    assert ("retry-after" in answer.headers) is (status == 503)
    assert ("www-authenticate" in answer.headers) is (status == 401)


def test_a_full_service_says_when_to_come_back_and_one_that_never_takes_it_does_not() -> None:
    full = http_error(errors.ResourceExhausted("prompt: full", 2.3))
    assert (full.status, full.headers["retry-after"]) == (429, "3")
    assert json.loads(full.body)["error"] | {"param": 0} == {
        **{"message": "prompt: full", "type": "rate_limit_error", "param": 0, "code": 429}
    }
    large = http_error(errors.ResourceExhausted("prompt: too large"))
    assert large.status == 413
    assert "retry-after" not in large.headers
