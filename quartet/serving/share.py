"""The share of a call, which decides the queue that it joins."""

from dataclasses import dataclass, field

from quartet.security.identity import HasMetadata, caller_of
from quartet.wire.callers import LONGEST_NAME, PURPOSE, RUN, Purpose


@dataclass(frozen=True, slots=True)
class Share:
    """A caller and its purpose. Calls of equal shares wait in one queue."""

    name: str
    purpose: Purpose
    run: str = field(default="", compare=False)
    """The name that the caller declares, by which runs of one identity can be told apart."""


UNKNOWN = Share("anonymous", Purpose.FOREIGN)
"""The share of a caller that does not name itself."""


def share_of(context: HasMetadata) -> Share:
    """The share of a call: by its caller's identity if the proxy requires one, else as the call's metadata declares.

    It decides on the place in the queue, never on permissions. A declared purpose counts only if the caller is a
    trainer.
    """
    given = {key: str(value) for key, value in context.invocation_metadata() or ()}
    purpose = Purpose.parse(given.get(PURPOSE, ""))
    caller = caller_of(context)
    run = given.get(RUN, UNKNOWN.name)[:LONGEST_NAME]
    # It is written to logs, where a caller's line breaks and control characters have no place.
    run = run if run.isprintable() else repr(run)
    if not caller.anonymous:
        return Share(caller.name, purpose if caller.role == "trainer" else Purpose.FOREIGN, run)
    return Share(run, purpose, run)
