"""The caller's name and role, which the proxy adds to a call and a replica reads."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

Role = Literal["trainer", "sampler", "judge-client", "prober"]
"""trainer: everything. sampler: Generate and the rollout service's Info, and OpenAI's protocol. judge-client: Score,
Logprobs and Info. prober: health and Info."""

IDENTITY_KEY = "quartet-identity"
ROLE_KEY = "quartet-role"
"""Metadata keys that the proxy sets on every call, replacing any that the caller sent."""


class HasMetadata(Protocol):
    """A servicer context, gRPC's own or the copy of it that Serve hands to a replica."""

    def invocation_metadata(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller, or ANONYMOUS where callers need no identity."""

    name: str
    role: Role

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller as metadata of a call to a replica."""
        return ((IDENTITY_KEY, self.name), (ROLE_KEY, self.role))


ANONYMOUS = Caller("anonymous", "trainer")
"""A caller on plain loopback without a policy: it has no name and may do everything."""


def caller_of(context: HasMetadata) -> Caller:
    """The caller of a call; ANONYMOUS for a call that did not come through the proxy, such as a test's."""
    sent: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        sent[key] = value
    name, role = sent.get(IDENTITY_KEY), sent.get(ROLE_KEY)
    if name is None or role not in get_args(Role):
        return ANONYMOUS
    return Caller(name, role)  # type: ignore[arg-type]  # one of the three


def without_identity(metadata: Any) -> tuple[tuple[str, Any], ...]:
    """A caller's metadata without the keys that only the proxy may set."""
    return tuple((key, value) for key, value in metadata or () if key not in (IDENTITY_KEY, ROLE_KEY))
