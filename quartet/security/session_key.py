"""Keys of sessions: each is good for the requests of one session, in the name of the caller that started it."""

import hashlib
import hmac
import re
import secrets

from quartet.wire.errors import Unauthenticated

SESSION = re.compile(r"session-[0-9a-f]{32}(?:-[0-9]{1,4})?")
"""Form of a session's number, which the door chooses. Of several that are started together each has its place behind
the number of all."""
KEY = "quartet-session-key"
"""Header with the key of a session that is being started, from the door to the replica that answers with it."""
_KEY, _BETWEEN = "qs", "~"


def new_session() -> str:
    """The number of another session."""
    return f"session-{secrets.token_hex(16)}"


def is_one_of_several(session: str) -> bool:
    """True for the number of a session that was started together with others."""
    return session.count("-") == 2


def key_of(key: str, place: int) -> tuple[str, str]:
    """Number and key of one of several sessions that are started together, from the key that the door has made for
    all of them, which is given to no one."""
    kind, caller, session, seal = key.split(_BETWEEN)
    name = f"{session}-{place}"
    return name, _BETWEEN.join((kind, caller, name, _sealed(seal.encode(), str(place))))


class SessionKeys:
    """The keys that one door gives out, and takes until its process ends. Each is sealed by a secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def make(self, caller: str, session: str) -> str:
        """The key of a session that the caller of this name has started."""
        return _BETWEEN.join((_KEY, caller, session, self._seal(caller, session)))

    def read(self, token: str) -> tuple[str, str] | None:
        """Name of the caller and number of the session whose key this is; None for another token.

        Raises:
            Unauthenticated: it is one of another door, or forged.
        """
        kind, _, rest = token.partition(_BETWEEN)
        if kind != _KEY:
            return None
        caller, session, seal = (*rest.split(_BETWEEN), "", "", "")[:3]
        if not hmac.compare_digest(seal.encode(), self._seal(caller, session).encode()):
            raise Unauthenticated(
                "this session's key is not one of this proxy's, which may have been restarted: its owner gets "
                "another by POST /rl/start_session with the number in X-Session-ID"
            )
        return caller, session

    def _seal(self, caller: str, session: str) -> str:
        if is_one_of_several(session):
            of_all, _, place = session.rpartition("-")
            return _sealed(self._seal(caller, of_all).encode(), place)
        return _sealed(self._secret, f"{caller}{_BETWEEN}{session}")


def _sealed(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
