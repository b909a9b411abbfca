"""The order in which rows of many calls are served: by purpose, then fairly by tokens among the callers."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from quartet.serving.share import Share
from quartet.wire.callers import Purpose

MOST_PASSED_OVER = 8
"""Turns that a waiting purpose is passed over for higher ones; it gets the next turn."""

Call = TypeVar("Call")


@dataclass(frozen=True, slots=True)
class Slice(Generic[Call]):
    """Rows of one call that are processed together."""

    call: Call
    rows: NDArray[np.int32]
    tokens: int


class _Entry(Generic[Call]):
    """The waiting rows of one call, shortest first: rows of similar length need little padding."""

    def __init__(self, call: Call, costs: NDArray[np.int32]) -> None:
        self.call = call
        # Four bytes per row: for calls whose rows have a single token, this bookkeeping is most of the memory.
        self._order = np.argsort(costs, kind="stable").astype(np.int32)
        self._ends = np.cumsum(costs[self._order], dtype=np.int32)
        self._at = 0

    def __len__(self) -> int:
        return len(self._order) - self._at

    @property
    def _taken(self) -> int:
        return int(self._ends[self._at - 1]) if self._at else 0

    @property
    def next_cost(self) -> int:
        """Tokens of the next row."""
        return int(self._ends[self._at]) - self._taken

    def take(self, tokens: int, most_rows: int) -> Slice[Call]:
        """Takes the next rows: at least one, and further ones up to `tokens` in total and `most_rows`."""
        fitting = int(np.searchsorted(self._ends, self._taken + tokens, side="right")) - self._at
        start, before = self._at, self._taken
        self._at += min(max(fitting, 1), most_rows, len(self))
        return Slice(self.call, self._order[start : self._at], int(self._ends[self._at - 1]) - before)


@dataclass(slots=True)
class _Lane(Generic[Call]):
    """One caller's waiting calls, and the tokens that it may still take in this round."""

    entries: deque[_Entry[Call]] = field(default_factory=deque)
    credit: int = 0
    in_turn: bool = False


class FairQueue(Generic[Call]):
    """Deficit round robin in tokens among the callers of a purpose, and purposes in their order.

    Callers get equal shares of tokens, however many rows their calls hold. Rows that are taken together have one
    purpose, so that training never computes in a batch with another caller's rows.

    For example, with a quantum of 100 tokens, A's call of ten rows of 100 tokens and B's call of two rows are taken
    in the order A B A B A A ...: B is done after four rows although A came first.
    """

    def __init__(self, quantum: int) -> None:
        """
        Args:
            quantum: tokens added to a caller's credit in each round.
        """
        self._quantum = quantum
        self._lanes: dict[Purpose, dict[Share, _Lane[Call]]] = {purpose: {} for purpose in Purpose}
        self._rounds: dict[Purpose, deque[Share]] = {purpose: deque() for purpose in Purpose}
        self._again: dict[Purpose, deque[tuple[Share | None, list[Slice[Call]]]]] = {p: deque() for p in Purpose}
        self._passed_over = dict.fromkeys(Purpose, 0)
        self._paused: set[Share] = set()

    def __bool__(self) -> bool:
        return any(self._waits(purpose) for purpose in Purpose)

    def add(self, share: Share, call: Call, costs: NDArray[np.int32]) -> None:
        """Queues a call; `costs` are the tokens of each of its rows."""
        if not len(costs):
            return
        lanes = self._lanes[share.purpose]
        if share not in lanes:
            lanes[share] = _Lane()
            if share not in self._paused:
                self._rounds[share.purpose].append(share)
        lanes[share].entries.append(_Entry(call, costs))

    def again(self, purpose: Purpose, slices: list[Slice[Call]], share: Share | None = None) -> None:
        """Puts back slices that were taken; they are the next to be taken of their purpose, unchanged, but not while
        `share` is paused."""
        self._again[purpose].appendleft((share, slices))

    def drop(self, share: Share, call: Call) -> None:
        """Removes the waiting rows of a call."""
        if lane := self._lanes[share.purpose].get(share):
            lane.entries = deque(entry for entry in lane.entries if entry.call is not call)
            self._leave_if_empty(share, lane)

    def pause(self, share: Share) -> None:
        """Passes over a caller until `resume`."""
        self._paused.add(share)
        if share in self._rounds[share.purpose]:
            self._rounds[share.purpose].remove(share)

    def resume(self, share: Share) -> None:
        """Ends a pause; does nothing if the caller is not paused."""
        if share in self._paused:
            self._paused.remove(share)
            if share in self._lanes[share.purpose]:
                self._rounds[share.purpose].append(share)

    def next_purpose(self, purposes: tuple[Purpose, ...] = tuple(Purpose)) -> Purpose | None:
        """The purpose among `purposes` that is next; None if none of them waits."""
        waiting = [purpose for purpose in purposes if self._waits(purpose)]
        if not waiting:
            return None
        late = [purpose for purpose in waiting if self._passed_over[purpose] >= MOST_PASSED_OVER]
        chosen = late[0] if late else waiting[0]
        for purpose in waiting:
            self._passed_over[purpose] = 0 if purpose is chosen else self._passed_over[purpose] + 1
        return chosen

    def take(
        self, purpose: Purpose, tokens: int, most_rows: int, apart: Callable[[Share], bool] = lambda share: False
    ) -> list[Slice[Call]]:
        """Takes the next rows of a purpose, up to `tokens` and `most_rows`; a longer row is taken alone, and no rows
        of a caller that is `apart` with those of another."""
        for index, (whose, slices) in enumerate(self._again[purpose]):
            if whose not in self._paused:
                del self._again[purpose][index]
                return slices
        taken: list[Slice[Call]] = []
        last: Share | None = None
        while self._rounds[purpose] and tokens > 0 and most_rows:
            share, lane = self._next_lane(purpose)
            if last is not None and (
                lane.entries[0].next_cost > tokens or (share != last and (apart(share) or apart(last)))
            ):
                break
            last = share
            part = lane.entries[0].take(min(lane.credit, tokens), most_rows)
            taken.append(part)
            lane.credit -= part.tokens
            tokens, most_rows = tokens - part.tokens, most_rows - len(part.rows)
            self._leave_if_empty(share, lane)
        return taken

    def _waits(self, purpose: Purpose) -> bool:
        return bool(self._rounds[purpose]) or any(share not in self._paused for share, _ in self._again[purpose])

    def _next_lane(self, purpose: Purpose) -> tuple[Share, _Lane[Call]]:
        """The next caller, with credit for at least its next row."""
        callers = self._rounds[purpose]
        while True:
            lane = self._lanes[purpose][callers[0]]
            if not lane.in_turn:
                lane.credit, lane.in_turn = lane.credit + self._quantum, True
            if lane.entries[0].next_cost <= lane.credit:
                return callers[0], lane
            lane.in_turn = False
            callers.rotate(-1)

    def _leave_if_empty(self, share: Share, lane: _Lane[Call]) -> None:
        while lane.entries and not len(lane.entries[0]):
            lane.entries.popleft()
        if not lane.entries:
            del self._lanes[share.purpose][share]
            if share not in self._paused:
                self._rounds[share.purpose].remove(share)
