"""The base class of the four services' asynchronous clients.

Needs grpcio and nothing of Ray, vLLM or torch, so that anything can call a service.
"""

import asyncio
import copy
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import grpc

from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.errors import (
    DeadlineExceeded,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    from_rpc,
)
from quartet.wire.hedging import HedgingDelay, first_answer

Stub = TypeVar("Stub")
Method = Callable[..., Awaitable[Any]]
Metadata = tuple[tuple[str, str], ...]

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default gRPC waits up to two minutes between attempts to reconnect: longer than our deadlines.
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A host that vanished does not close its connections, so the other end has to answer pings while a call waits.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC would otherwise send all calls, those to loopback too, to the proxy that the variable http_proxy names, and
    # with them the token of a channel without TLS.
    ("grpc.enable_http_proxy", 0),
]
ATTEMPT_S = 5.0
"""Silence after which a call that any replica can answer is sent to another replica too."""


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to Serve's gRPC proxy at host:port; encrypted when given credentials.

    `connect` in quartet/security/credentials.py finds the credentials; this function takes them as given.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS, interceptors=interceptors)
    named = [] if server_name is None else [("grpc.ssl_target_name_override", server_name)]
    return grpc.aio.secure_channel(target, credentials, options=[*OPTIONS, *named], interceptors=interceptors)


def too_busy(error: ResourceExhausted, deadline: Deadline) -> DeadlineExceeded:
    """The error of a call that was refused and got no answer by its deadline; a run may wait and resume from a
    checkpoint."""
    return DeadlineExceeded(f"{error}; given up at the deadline of {deadline.timeout_s:g} s")


_LIKE_TLS = re.compile(r"Socket closed|SSL|WRONG_VERSION_NUMBER|[Hh]andshake")
"""gRPC's words where only one end of a connection has TLS, and in other cases too."""
_TLS_ADVICE = (
    "; if only one of the port and this caller has TLS: connect() of quartet.security.credentials takes what "
    "QUARTET_CREDENTIALS names"
)


class ServiceClient(Generic[Stub]):
    """A client of one application behind a Serve proxy.

    Every call has a deadline. Until then UNAVAILABLE and RESOURCE_EXHAUSTED are retried, after growing pauses that
    are at least as long as the service asks for: all calls are safe to repeat (Train carries a step id). Any other
    failure is raised as its ServiceError. A call that any replica can answer is sent to a second one when the first
    is silent, and the first answer counts, so that a frozen replica does not use up the deadline.

    For example, with a deadline of 60 s and `attempt_s` 5: replica A hangs, replica B gets the call after 5 s and
    answers at 6 s; the caller has waited 6 s and not 60.
    """

    SERVICE: ClassVar[str]
    """Default name of the service's application."""
    STUB: ClassVar[type[Any]]
    """The stub class generated from the service's proto."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        application: str | None = None,
        *,
        attempt_s: float = ATTEMPT_S,
        metadata: Metadata = (),
    ) -> None:
        """
        Args:
            channel: to Serve's proxy.
            application: name of the Serve application to call; None: the default.
            attempt_s: seconds of silence after which a second replica is asked too.
            metadata: sent with every call besides the application's name.
        """
        application = application or self.SERVICE
        self._channel = channel
        self._stub: Stub = self.STUB(channel)
        self.application = application
        """Name of the Serve application that is called."""
        self._metadata = (("application", application), *metadata)
        self._delays: defaultdict[str, HedgingDelay] = defaultdict(lambda: HedgingDelay(attempt_s))
        """The delay before a second replica is asked, by the name of the method."""
        self._answered = False
        """True once the server has answered, so that it has TLS if and only if this caller has."""

    async def _call(
        self,
        method: Method,
        request: Any,
        deadline: Deadline | float,
        name: str,
        *,
        anywhere: bool = False,
        divisible: bool = False,
    ) -> Any:
        """One unary call, repeated until the deadline.

        Args:
            method: the stub's method.
            request: its message.
            deadline: the deadline, or seconds from now.
            name: the method's name, for errors.
            anywhere: True if every replica gives the same answer.
            divisible: True if the caller can split the request: a refusal for its size is then raised at once.
        """
        deadline = deadline if isinstance(deadline, Deadline) else Deadline(deadline)
        attempt = partial(self._attempt, method, request, deadline, name)
        backoff = Backoff(deadline)
        refusal: ResourceExhausted | None = None
        while True:
            try:
                if anywhere:
                    return await first_answer(attempt, self._delays[name].seconds(deadline.timeout_s))
                return await attempt()
            except Unavailable as error:
                await backoff.wait(error)
            except ResourceExhausted as error:
                if isinstance(error, TooLarge) or (divisible and error.retry_after_s is None):
                    raise
                refusal = error
                await backoff.wait(too_busy(error, deadline), error.retry_after_s)
            except DeadlineExceeded:
                if refusal is None:
                    raise
                # The reason why the last try had so little time left.
                raise too_busy(refusal, deadline) from None

    async def _attempt(self, method: Method, request: Any, deadline: Deadline, name: str) -> Any:
        """One try of a call, by whatever replica."""
        call, began = f"{self.application}.{name}", deadline.now
        try:
            answer = await method(request, metadata=self._metadata, timeout=deadline.left_s)
            self._answered = True
            self._delays[name].saw(deadline.now - began)
            return answer
        except grpc.RpcError as error:
            failure = from_rpc(error, call)
        if isinstance(failure, Unavailable) and not self._answered and _LIKE_TLS.search(str(failure)):
            raise Unavailable(f"{failure}{_TLS_ADVICE}")
        if isinstance(failure, DeadlineExceeded):
            raise DeadlineExceeded(f"{call}: no answer within {deadline.timeout_s:g} s")
        raise failure

    def declaring(self, metadata: Metadata) -> Self:
        """A copy of this client, on the same channel, that sends this metadata with every call instead."""
        other = copy.copy(self)
        other._metadata = (("application", self.application), *metadata)
        return other

    async def reachable(self, timeout_s: float) -> bool:
        """True if a gRPC server accepts the channel's connection within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Closes the channel, for all clients that share it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
