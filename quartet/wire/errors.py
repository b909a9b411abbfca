"""Errors that services and clients share, each the name of a gRPC status."""

import re

import grpc

from quartet.wire.backoff import pushback_of, with_pushback


class ServiceError(Exception):
    """An error with a gRPC status. The message is for the caller: it names the field and what would be right."""

    code = grpc.StatusCode.INTERNAL


class InvalidArgument(ServiceError):
    """The request can never succeed as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class FailedPrecondition(ServiceError):
    """The request may succeed once something else has happened, or on another replica."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class LeaseLost(FailedPrecondition):
    """Another run holds the service; nothing was changed. The message begins with `lease: `."""


class OffTimeline(FailedPrecondition):
    """A replica's weights are not of the run's timeline: it missed that the run went back to a checkpoint, or it has
    just started. The message begins with `timeline: `."""


class Unavailable(ServiceError):
    """No replica could answer; the call is safe to repeat."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    """No answer in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ResourceExhausted(ServiceError):
    """The service is full, or the call alone is larger than it ever admits."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        """
        Args:
            message: for the caller.
            retry_after_s: seconds after which to repeat the call. None: the call is larger than the service ever
                admits and has to be split; if it cannot be split, it may be repeated at any time.
        """
        super().__init__(with_pushback(message, retry_after_s))
        self.retry_after_s = retry_after_s


class TooLarge(ResourceExhausted):
    """One message is larger than the other end ever reads."""


class NotFound(ServiceError):
    """The application does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class InvalidReply(ServiceError):
    """A service's answer is wrong: it has another number of values than asked for, or a number that is not finite."""

    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(ServiceError):
    """The port has a policy, and the call brings no proof of an identity that it names."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(ServiceError):
    """The caller is known and may not make this call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFinite(ServiceError):
    """Weights, or the gradients of too many steps in a row, are not finite; such weights are not pushed or saved."""

    code = grpc.StatusCode.DATA_LOSS


class Internal(ServiceError):
    """A fault of the service."""


_ERRORS_BY_CODE: dict[grpc.StatusCode, type[ServiceError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        FailedPrecondition,
        Unavailable,
        DeadlineExceeded,
        ResourceExhausted,
        NotFound,
        Unauthenticated,
        PermissionDenied,
        NotFinite,
        Internal,
    )
}


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group, in its groups, and so on; or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def reasons(error: BaseException) -> str:
    """The messages of all failures, each once."""
    return "; ".join(dict.fromkeys(str(leaf) or type(leaf).__name__ for leaf in leaves(error)))


# If a replica dies during a call, Serve's proxy answers INTERNAL with the text of Ray's ActorDiedError or
# ActorUnavailableError. For the caller this is a failure that a repetition at another replica mends.
REPLICA_LOST = re.compile(r"The actor (died|[0-9a-f]+ is unavailable|is dead)|ActorDiedError|ActorUnavailableError")
REPLICA_DIED = "the replica died while it answered"
# A replica or proxy that shuts down cancels the calls that it has taken.
CALL_CANCELLED = "the proxy or the replica was ending and cancelled the call"
# The words of gRPC and of our ports (serving/door/checked.py) for a message that they refused to read.
_TOO_LARGE = re.compile(r"message larger than max|more than \d+ fields and elements of lists")
# gRPC's own words for a call too many on a port: however small its parts, none would get in.
_PORT_FULL = re.compile(r"Concurrent RPC limit exceeded")
_PORT_FULL_PAUSE_S = 1.0
_ERRORS_BY_BEGINNING: dict[str, type[ServiceError]] = {"lease: ": LeaseLost, "timeline: ": OffTimeline}


def from_rpc(error: grpc.RpcError, call: str) -> ServiceError:
    """The ServiceError for a gRPC error; its message begins with the name of the call."""
    code = error.code()  # type: ignore[attr-defined]
    details = error.details()  # type: ignore[attr-defined]
    if code is grpc.StatusCode.INTERNAL and REPLICA_LOST.match(details or ""):
        return Unavailable(f"{call}: {REPLICA_DIED}")
    if code is grpc.StatusCode.CANCELLED:  # not by the caller, whose own cancellation is no error of gRPC's
        return Unavailable(f"{call}: {CALL_CANCELLED}")
    kind = _ERRORS_BY_CODE.get(code, Internal)
    if kind is FailedPrecondition:
        said = details or ""
        kind = next((its for text, its in _ERRORS_BY_BEGINNING.items() if said.startswith(text)), kind)
    if kind is ResourceExhausted:
        message, retry_after_s = pushback_of(details or "")
        if _TOO_LARGE.search(message):
            return TooLarge(f"{call}: {message}")
        if _PORT_FULL.search(message):
            return ResourceExhausted(f"{call}: {message}", _PORT_FULL_PAUSE_S)
        return ResourceExhausted(f"{call}: {message}", retry_after_s)
    prefix = "" if kind is not Internal or code is grpc.StatusCode.INTERNAL else f"{code.name}: "
    return kind(f"{call}: {prefix}{details}")
