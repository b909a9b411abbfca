"""The decision on a call: the identity of its caller, and whether that caller may make it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quartet.security.authentication import Directory
from quartet.security.http_routes import STARTS_SESSION, routes_for
from quartet.security.identity import ANONYMOUS, HOLDER, Caller
from quartet.security.policy import Limits
from quartet.wire.errors import PermissionDenied, ResourceExhausted, Unauthenticated

HEALTH = "/grpc.health.v1.Health/"
_METHODS: Mapping[str, frozenset[str]] = {
    "sampler": frozenset({"/quartet.v1.Rollout/Generate", "/quartet.v1.Rollout/Info"}),
    "judge-client": frozenset(
        {
            *("/quartet.v1.Reward/Score", "/quartet.v1.Reward/Info"),
            *("/quartet.v1.Reference/Logprobs", "/quartet.v1.Reference/Info"),
        }
    ),
    "prober": frozenset(
        {
            "/ray.serve.RayServeAPIService/Healthz",
            *(f"/quartet.v1.{name}/Info" for name in ("Rollout", "Reward", "Reference", "Critic")),
        }
    ),
    HOLDER: frozenset(),
}
"""Role -> the methods that it may call over gRPC; a trainer may call all, those of later versions too."""


class Gate:
    """Checks identity, application and method of a call. Without a policy, on plain loopback, only limits apply."""

    def __init__(self, directory: Callable[[], Directory] | None) -> None:
        """
        Args:
            directory: returns the current identities; None if callers need no identity.
        """
        self._directory = directory

    @property
    def limits(self) -> Limits:
        """The current limits."""
        return Limits() if self._directory is None else self._directory().policy.limits

    def admit(
        self,
        method: str,
        application: str | None,
        auth_context: Mapping[str, Iterable[bytes]],
        metadata: Iterable[tuple[str, Any]],
    ) -> Caller:
        """Returns the caller if it may call `method` of `application`.

        Args:
            method: as `/package.Service/Method`.
            application: name of the Serve application that is called; None if the call names none.
            auth_context: the caller's properties from TLS.
            metadata: the caller's metadata.

        Raises:
            Unauthenticated: the caller is unknown.
            PermissionDenied: the caller is known but may not make this call.
        """
        if self._directory is None:
            return ANONYMOUS
        directory = self._directory()
        return _permitted(directory, directory.caller(auth_context, metadata), method, application)

    def admit_holder(self, name: str, session: str, method: str, application: str | None) -> Caller:
        """Returns the holder of the key of a session, which the caller `name` has started, if it may call `method` of
        `application`. Raises as `admit`."""
        holder = Caller(name, HOLDER, session)
        if self._directory is None:
            return holder
        directory = self._directory()
        owner = directory.policy.identities.get(name)
        if owner is None:
            raise Unauthenticated(f"the policy does not name {name}, who started this session, any longer")
        if not may_call(owner.role, STARTS_SESSION):
            raise PermissionDenied(f"{name} has the role {owner.role} by now, which may have no sessions")
        return _permitted(directory, holder, method, application)

    def check_size(self, method: str, size: int) -> None:
        """Raises ResourceExhausted if a request of `size` bytes is larger than the method accepts."""
        largest = self.limits.of(method)
        if size > largest:
            raise ResourceExhausted(f"{method[1:]}: a request of {size} bytes, and the limit is {largest}; split it")


def _permitted(directory: Directory, caller: Caller, method: str, application: str | None) -> Caller:
    """The caller, if it may call `method` of `application`."""
    if not may_call(caller.role, method):
        raise PermissionDenied(f"{caller.name} has the role {caller.role}, which may not call {method[1:]}")
    applications = directory.policy.identities[caller.name].applications
    if applications is not None and application is not None and application not in applications:
        raise PermissionDenied(f"{caller.name} may not call the application {application[:64]!r}")
    return caller


def may_call(role: str, method: str) -> bool:
    """True if `role` may call `method`, given as `/package.Service/Method`. Every role may ask for health."""
    return role == "trainer" or method.startswith(HEALTH) or method in _METHODS[role] or method in routes_for(role)
