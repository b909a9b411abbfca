"""Choice of a scorer by its name, in the service and in its client."""

from collections.abc import Collection
from dataclasses import dataclass

from quartet.wire.errors import InvalidArgument

_MOST = 64
"""Most characters of a wrong name that an error repeats."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A scorer as clients over HTTP choose it."""

    name: str
    """The name; empty for the only one of an application that gives it none."""
    scores: tuple[str, ...]
    """Names of its scores; empty if it gives one."""


def chosen(name: str, names: Collection[str]) -> str:
    """The scorer that a request names, or the only one if it names none. InvalidArgument lists those that there are
    if it is none of them, or if there are several and it names none."""
    if name in names:
        return name
    if not name and len(names) == 1:
        return next(iter(names))
    given = f"{name[:_MOST]!r} is none of those there are" if name else "required, as there are several"
    raise InvalidArgument(f"scorer: {given}: {', '.join(sorted(names)) or 'one without a name'}")
