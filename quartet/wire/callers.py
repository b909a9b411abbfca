"""The metadata with which a caller names itself and its purpose: for fair shares, never for permissions."""

from enum import IntEnum

RUN = "quartet-run"
"""Metadata key: name of the run or program that calls. Calls of one name share one queue."""
PURPOSE = "quartet-purpose"
"""Metadata key: the call's purpose, as the name of a Purpose in lower case."""
LONGEST_NAME = 64
"""Characters of a declared name that are kept."""


class Purpose(IntEnum):
    """The purpose of a call. Lower values are served first."""

    TRAINING = 0
    """A training step waits for the call."""
    EVALUATION = 1
    """An evaluation, of a run or by `quartet evaluate`."""
    FOREIGN = 2
    """Anything else."""

    @classmethod
    def parse(cls, text: str) -> "Purpose":
        """The purpose with this name; FOREIGN for any other text."""
        return cls.__members__.get(text.upper(), cls.FOREIGN)


def declared(run: str, purpose: Purpose) -> tuple[tuple[str, str], ...]:
    """Metadata for every call of a client. `run` is cut to ASCII, as gRPC's metadata must be."""
    name = run.encode("ascii", "replace").decode()[:LONGEST_NAME]
    return ((RUN, name), (PURPOSE, purpose.name.lower()))
