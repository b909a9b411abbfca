"""The caller's name and role, which the proxy adds to a call and a replica reads."""

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args

Role = Literal["trainer", "sampler", "judge-client", "prober"]
"""trainer: everything. sampler: Generate and the rollout service's Info, and OpenAI's protocol. judge-client: Score,
Logprobs and Info. prober: health and Info."""

HOLDER: Final = "session"
"""Role of a caller whose only proof is the key of a session: the requests of this session over HTTP. No policy gives
it."""
IDENTITY_KEY = "quartet-identity"
ROLE_KEY = "quartet-role"
SESSION_KEY = "quartet-session"
"""Metadata keys that the proxy sets on every call, the last where it belongs to a session, replacing any that the
caller sent."""


class HasMetadata(Protocol):
    """A servicer context, gRPC's own or the copy of it that Serve hands to a replica."""

    def invocation_metadata(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller, or ANONYMOUS where callers need no identity."""

    name: str
    role: Role | Literal["session"]
    session: str = ""
    """Number of the session that the call belongs to; empty for none."""

    @property
    def anonymous(self) -> bool:
        """True if nothing proves who it is; such a caller may hold a session's key too."""
        return self.name == ANONYMOUS.name

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller as metadata of a call to a replica."""
        session = ((SESSION_KEY, self.session),) if self.session else ()
        return ((IDENTITY_KEY, self.name), (ROLE_KEY, self.role), *session)


ANONYMOUS = Caller("anonymous", "trainer")
"""A caller on plain loopback without a policy: it has no name and may do everything."""


def caller_of(context: HasMetadata) -> Caller:
    """The caller of a call; ANONYMOUS for a call that did not come through the proxy, such as a test's."""
    sent: dict[str, str] = dict(context.invocation_metadata() or ())
    name, role = sent.get(IDENTITY_KEY), sent.get(ROLE_KEY)
    if name is None or role not in (*get_args(Role), HOLDER):
        return ANONYMOUS
    return Caller(name, role, sent.get(SESSION_KEY, ""))  # type: ignore[arg-type]  # one of these


def without_identity(metadata: Any) -> tuple[tuple[str, Any], ...]:
    """A caller's metadata without the keys that only the proxy may set."""
    return tuple((key, value) for key, value in metadata or () if key not in (IDENTITY_KEY, ROLE_KEY, SESSION_KEY))
