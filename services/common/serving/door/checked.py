"""A request that was read once, to see that it can be, and travels on as the bytes that arrived."""

from typing import Any


class Checked:
    """A request on its way through Serve's proxy, which does nothing with it but pickle it for the replica.

    It unpickles as the message that its bytes are. Pickling the message itself would write it out again, which keeps
    the event loop several times as long as copying the bytes.
    """

    def __init__(self, kind: type, raw: bytes) -> None:
        """
        Args:
            kind: the message's generated class.
            raw: a message of that class.
        """
        self._kind = kind
        self._raw = raw

    def __reduce__(self) -> tuple[Any, ...]:
        """The bytes, and how they are read."""
        return _message, (self._kind, self._raw)


def _message(kind: Any, raw: bytes) -> Any:
    return kind.FromString(raw)
