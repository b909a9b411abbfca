"""Process groups between the learner and the rollout workers, apart from torch's default group.

Every change of the members forms a new group under its own prefix of one long-lived store. Re-forming costs
milliseconds, and a late member of an older group finds no peers there. Gloo and NCCL differ only in their Wire.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, Store

log = logging.getLogger("quartet")

SENDER = 0
"""The learner's rank in every group."""
ABANDONED = "abandoned"
"""Key that the sender sets in a membership's part of the store when it gives the membership up."""
ROLL_S = 0.01
"""Seconds between two looks of a member whether all others have come."""
LOOK_S = 0.5
"""Seconds between two looks of a member whether the sender has abandoned the group."""
MOMENT_S = 0.001
"""Shortest deadline that is given to a library, in seconds."""
ABORT_S = 2.0
"""Seconds in which an abort usually ends; a thread is left with one that takes longer."""

Form = Callable[[Store, int, int, timedelta], Any]
"""Makes one of torch's process groups from a store, this member's rank, the number of members and the timeout."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The library that carries a group's bytes."""

    form: Form
    """Makes the process group; RuntimeError if the members do not come in time."""
    device: torch.device | None = None
    """The GPU whose memory the library reads and writes; None: host memory."""


class Group:
    """One membership's group. Every operation raises RuntimeError after the timeout instead of hanging."""

    def __init__(
        self,
        store: Store,
        wire: Wire,
        *,
        rank: int,
        world_size: int,
        membership: int,
        timeout_s: float,
        joining_s: float | None = None,
    ) -> None:
        """Joins the group; returns when all `world_size` members have joined.

        Args:
            store: the rendezvous store of all groups.
            wire: gloo's or NCCL's wire.
            rank: this member's rank, 0 for the sender.
            world_size: number of members, the sender and the workers.
            membership: number of the membership; members of different numbers never meet.
            timeout_s: deadline of joining and of each broadcast, in seconds.
            joining_s: another deadline of joining; None for the same.

        Raises:
            RuntimeError: not all members came in time.
        """
        self.timeout = timedelta(seconds=timeout_s)
        self._joining_s = timeout_s if joining_s is None else joining_s
        self._rank, self._world_size, self._wire = rank, world_size, wire
        self.membership = membership
        self._meeting = _part(store, membership)
        # A connection of its own: a TCPStore answers nothing else while it waits for a member's key.
        self._aside = self._meeting.clone()
        self._group: Any = None
        self._given_up = False
        until = time.monotonic() + self._joining_s
        self._call_the_roll(until)
        self._form(until)

    def _call_the_roll(self, until: float) -> None:
        """Waits until all members are about to connect. The libraries that connect them wait for one that has died:
        gloo until its deadline, NCCL without one."""
        self._meeting.set(_here(self._rank), b"")
        everyone = [_here(rank) for rank in range(self._world_size)]
        while not self._aside.check(everyone):
            self._expect_sender()
            if time.monotonic() >= until:
                missing = [rank for rank, key in enumerate(everyone) if not self._aside.check([key])]
                raise RuntimeError(f"the group did not form: ranks {missing} did not come in {self._joining_s:g} s")
            time.sleep(ROLL_S)

    def _form(self, until: float) -> None:
        """Connects the members, in a thread that is left behind if the sender gives the membership up: once a member
        has died, the library may never return."""
        failures: list[Exception] = []

        def connect() -> None:
            try:
                left = timedelta(seconds=max(until - time.monotonic(), MOMENT_S))
                self._group = self._wire.form(self._meeting, self._rank, self._world_size, left)
                if self._wire.device is not None:  # NCCL forms its communicator by its first operation
                    self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._wire.device))
            except Exception as error:
                failures.append(error)
            if self._given_up:
                self.close()

        thread = threading.Thread(target=connect, daemon=True, name="push group")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(max(0.0, min(LOOK_S, until - time.monotonic())))
                if thread.is_alive():
                    self._expect_sender()
                    if time.monotonic() >= until:
                        raise RuntimeError(f"the group did not form: no answer in {self._joining_s:g} s")
            if failures:
                raise RuntimeError(f"the group did not form: {failures[0]}")
        except RuntimeError:
            self._given_up = True
            self.close()
            raise

    def _expect_sender(self) -> None:
        """Raises RuntimeError if the sender has given this membership up."""
        if self.abandoned:
            raise RuntimeError(f"membership {self.membership} was given up by its sender")

    def broadcast(self, data: torch.Tensor) -> None:
        """Sends `data`, uint8 in memory of the wire's device, from the sender to all members, or receives into it.
        Blocks; RuntimeError on failure."""
        if self._group is None:
            raise RuntimeError("this member has left the group")
        options = BroadcastOptions()
        options.rootRank = SENDER
        options.rootTensor = 0
        options.timeout = self.timeout
        group = self._group
        try:
            work = group.broadcast([data], options)
        finally:
            del group  # `close` explains why
        try:
            work.wait(self.timeout)
        finally:
            del work  # for the same reason: it holds the connections too

    def tell(self, key: str, value: str) -> None:
        """Lets other members know something, under a key that is used once."""
        self._meeting.set(key, value)

    def told(self, key: str) -> str:
        """The value that another member lets know. RuntimeError if it does not within the timeout, or if the sender
        abandons the group, as it does when that member has failed."""
        until = time.monotonic() + self.timeout.total_seconds()
        while not self._aside.check([key]):
            self._expect_sender()
            if time.monotonic() >= until:
                raise RuntimeError(f"no other member told {key} in {self.timeout.total_seconds():g} s")
            time.sleep(ROLL_S)
        return bytes(self._aside.get(key)).decode()

    def abandon(self) -> None:
        """Leaves the group as its sender, and lets the members know. Callable from any thread.

        A member that forwards a broadcast to others may be gone for the orchestrator and still hold its connections
        open, so that the others would wait for it until the timeout.
        """
        self._aside.set(ABANDONED, b"")
        self.close()

    @property
    def abandoned(self) -> bool:
        """True if the sender has abandoned the group; RuntimeError if the store does not answer."""
        return bool(self._aside.check([ABANDONED]))

    def close(self) -> None:
        """Leaves the group; pending operations fail on all members. Returns within ABORT_S.

        NCCL's abort waits for a communicator that is forming, so it runs in a thread that can be abandoned: it ends
        when the communicator is given up (`nccl_wire`).
        """
        leave([self])

    def _aborting(self) -> threading.Thread | None:
        """A thread that has begun to abort the group; None if it was left before."""
        # Taken first, so that a second call, from any thread, does not abort the group again.
        group, self._group = self._group, None
        if group is None:
            return None
        thread = threading.Thread(target=_abort, args=(group,), daemon=True, name="push abort")
        # Freeing a group can wait for its operations, which is this thread's part. A propagating exception may keep
        # this object and its frames alive, so they must not hold the group.
        del group
        thread.start()
        return thread


def give_up(store: Store, membership: int) -> None:
    """Lets the members that meet under this number, the sender among them, give up their wait for one another."""
    _part(store, membership).set(ABANDONED, b"")


def _part(store: Store, membership: int) -> PrefixStore:
    """A membership's part of the store."""
    return PrefixStore(f"membership{membership}", store)


def _here(rank: int) -> str:
    """Key that a member sets when it is about to connect."""
    return f"here{rank}"


def leave(groups: Sequence[Group], seconds: float | None = None) -> None:
    """Leaves groups at the same time, as `Group.close` does; returns within `seconds`, ABORT_S if not given, for all
    together."""
    seconds = ABORT_S if seconds is None else seconds
    until = time.monotonic() + seconds
    for group, thread in [(group, group._aborting()) for group in groups]:
        if thread is None:
            continue
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            log.warning(
                "membership %d of a push was left, but its abort has not ended in %g s: it keeps a thread and, with "
                "NCCL, memory of the GPU until it does",
                group.membership,
                seconds,
            )


def _abort(group: Any) -> None:
    """Aborts one of torch's process groups. A failure is only noted, as the group is not used again."""
    try:
        group.abort()
    except Exception as error:
        log.warning("the abort of a push's group failed: %s", error)


def turned(rank: int, *, world_size: int, sender: int, senders: int) -> int:
    """A worker's rank in one sender's group, given its rank among all members.

    Broadcasts go down a tree in which some ranks forward data and most only receive. Rotating the ranks from sender
    to sender spreads the forwarding over the workers.
    """
    workers = world_size - 1
    return 1 + (rank - 1 + sender * workers // senders) % workers
