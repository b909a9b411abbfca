"""The lease of the run that may change a service's state: a fencing token."""

import time
from collections.abc import Callable
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from protos import common_pb2
from quartet.folders import replace_file
from quartet.wire.errors import FailedPrecondition, InvalidArgument, LeaseLost, Unavailable

LONGEST_S = 600.0
"""Longest time, in seconds, that a run may ask to count as alive without a renewal."""
LONGEST_ID = 200
"""Most characters of a run's id."""
MOST_AHEAD = 1 << 32
"""Most by which a claim may raise the lease's number: a claim of the largest would lock out all later runs."""


class Fence:
    """Lets through the calls of one run only: the last one that claimed the service, until another claims it. A lease
    belongs to the caller that claimed it: run and number in another caller's call are not the same lease.

    The numbers of leases only grow, so an older run is refused for good, even if it comes back after a long pause. A
    run that no longer counts as alive keeps its lease until another run claims the service.

    For example: run A claims with number 1 and 60 s. Run B's claim with number 2 is refused while A is alive. A stops
    renewing; after 60 s B's claim succeeds. When A wakes up, its calls with number 1 raise LeaseLost.
    """

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            file: keeps the lease, so that a replica that replaces this one knows it too; None: it is not kept.
            clock: returns seconds.
        """
        self._file = file
        self._clock = clock
        kept = _read(file) if file else common_pb2.Held()
        self._lease, self._ttl_s = kept.lease, kept.left_s
        # The time of the last renewal is not kept: the run has its full time again from here on.
        self._end = clock() + self._ttl_s

    def claim(self, lease: common_pb2.Lease, claim: common_pb2.Claim) -> bool:
        """Makes this the lease in force, or renews it; True if it differs from the one before.

        Raises:
            InvalidArgument: the lease or its time is not valid.
            LeaseLost: its number is not above the present lease's, or the present lease's run is alive.
        """
        if not 0 <= claim.ttl_s <= LONGEST_S:
            raise InvalidArgument(f"claim.ttl_s: {claim.ttl_s:g}; must be 0 to {LONGEST_S:g}")
        if not 0 < len(lease.run_id) <= LONGEST_ID or not lease.run_id.isprintable() or lease.number < 1:
            raise InvalidArgument(
                f"lease: needs a run_id of 1 to {LONGEST_ID} printable characters, and a number of at least 1"
            )
        if lease.number - self._lease.number > MOST_AHEAD:
            raise InvalidArgument(
                f"lease.number: {lease.number}; must be at most {MOST_AHEAD} above {self._lease.number}, "
                "the number of the lease in force"
            )
        changes = lease != self._lease
        if changes:
            if lease.number <= self._lease.number:
                raise self._refused(lease)
            same = (lease.run_id, lease.identity) == (self._lease.run_id, self._lease.identity)
            if self._clock() < self._end and not same and not claim.take_over:
                raise LeaseLost(
                    f"lease: run {_named(self._lease)} holds this service and is alive; stop it, or take over from "
                    f"it as run {_named(lease)}"
                )
        if self._file and (changes or claim.ttl_s != self._ttl_s):
            _write(self._file, common_pb2.Held(lease=lease, left_s=claim.ttl_s))
        self._lease = common_pb2.Lease(run_id=lease.run_id, number=lease.number, identity=lease.identity)
        self._ttl_s, self._end = claim.ttl_s, self._clock() + claim.ttl_s
        return changes

    def check(self, lease: common_pb2.Lease) -> None:
        """Returns if this is the lease in force.

        Raises:
            InvalidArgument: the call has no lease.
            FailedPrecondition: this replica has not received the claim of this lease.
            LeaseLost: a later lease is in force; the message names both runs.
        """
        if not lease.run_id:
            raise InvalidArgument(
                "lease: required by calls that change a service or expect a version or step of it; claim it first"
            )
        if lease.number > self._lease.number:
            raise FailedPrecondition(f"run {lease.run_id} (lease {lease.number}) has not claimed this replica yet")
        if lease != self._lease:
            raise self._refused(lease)

    def held(self) -> common_pb2.Held:
        """The lease in force, and the seconds for which its run still counts as alive."""
        return common_pb2.Held(lease=self._lease, left_s=max(0.0, self._end - self._clock()))

    def _refused(self, lease: common_pb2.Lease) -> LeaseLost:
        mine = self._lease
        lost = "no longer holds" if lease.identity == mine.identity else "does not hold"
        return LeaseLost(
            f"lease: run {_named(lease)} (lease {lease.number}) {lost} this service: "
            f"run {_named(mine)} (lease {mine.number}) does; nothing was changed"
        )


def _named(lease: common_pb2.Lease) -> str:
    return f"{lease.run_id} of {lease.identity}" if lease.identity else lease.run_id


def _read(file: Path) -> common_pb2.Held:
    try:
        return Parse(file.read_text(encoding="utf-8"), common_pb2.Held())
    except FileNotFoundError:
        return common_pb2.Held()
    except (OSError, UnicodeDecodeError, ParseError) as error:
        # Without the lease an older run would be let through.
        raise RuntimeError(
            f"{file} should hold a lease but does not ({error}); remove it if no run is active"
        ) from None


def _write(file: Path, held: common_pb2.Held) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, MessageToJson(held).encode())
    except OSError as error:
        raise Unavailable(f"this service cannot write its lease down: {error.strerror}") from None
