"""Errors of services as answers over HTTP, in the form that OpenAI's clients read."""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from quartet.wire import errors
from quartet.wire.backoff import pushback_of

_STATUSES: Mapping[type[errors.ServiceError], int] = {
    errors.InvalidArgument: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.FailedPrecondition: 409,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TOO_LARGE, _TOO_MANY, _INTERNAL, _UNAVAILABLE = 413, 429, 500, 503
_PAUSE_S = 1
"""Seconds after which to ask again where nothing says more."""


class HttpError(NamedTuple):
    """An answer that refuses a request or tells of a failure."""

    status: int
    message: str
    param: str | None = None
    """The request's field in question."""
    retry_after_s: int | None = None
    """Seconds after which to ask again; None if that would not help."""

    @property
    def body(self) -> bytes:
        """The answer's body, as JSON."""
        return json.dumps(self.contents).encode()

    @property
    def contents(self) -> Mapping[str, object]:
        """The body's contents."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        kind = "rate_limit_error" if self.status == _TOO_MANY else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        more = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        more |= {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return {"content-type": "application/json"} | more


def http_error(error: errors.ServiceError, param: str | None = None) -> HttpError:
    """The answer for an error of a service.

    A service that is full answers 429 with the pause after which to come back, and 413 a request that is larger than
    it ever takes.
    """
    message, _ = pushback_of(str(error))
    if isinstance(error, errors.ResourceExhausted):
        if error.retry_after_s is None:
            return HttpError(_TOO_LARGE, message, param)
        return HttpError(_TOO_MANY, message, param, math.ceil(error.retry_after_s))
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), _INTERNAL)
    return HttpError(status, message, param, _PAUSE_S if status == _UNAVAILABLE else None)
