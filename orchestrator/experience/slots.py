"""Slots for samples: as many are under way as can be trained on in time, so that none becomes too old."""

from collections.abc import Iterable


class Slots:
    """Admits groups of samples, and chooses which of the finished ones a batch takes. Decides only; does no work.

    A batch is `size` groups. A group admitted while the replicas serve version w is sampled by w or later, so version
    w + staleness is the last that may train on it: its deadline. Admission keeps all deadlines feasible:

        groups admitted and not taken <= size * (served + staleness - next_take + 1)

    The right side is what the batches of versions next_take to served + staleness hold. By induction the groups under
    way, sorted by deadline, always fill the coming batches in that order, each in time (earliest deadline first): for
    every version t, at most size * (t - next_take + 1) have a deadline of t or before.

    - Admission: no deadline is later than the new one, which is served + staleness. So only the numbers of groups for
      that version and later ones grow, and the rule above limits these.
    - A commit changes no deadline of a group that is under way; those admitted later get later ones.
    - A batch is taken only if what it leaves satisfies the bound for next_take + 1. The groups of the earliest
      deadlines do (each count falls by `size`, or to 0), so waiting for those always ends with a batch.
    - A discarded group leaves. No count grows, so the rule and every count keep their bounds. The group in its place
      is admitted by the rule, with a deadline of its own. While the loop waits, and once next_take is served,
      the rule has room for a whole batch at least, so that as many groups are under way as the batch lacks: waiting
      ends with a batch unless groups are discarded without end, which the caller limits.

    Hence no sample outlives its deadline, and none leaves but by `take` or `discard`, once. With size 2 and
    staleness 1, versions from 4 on:

        served 4, next_take 4:  2 * (4 + 1 - 4 + 1) = 4    groups 0 1 2 3 admitted, deadline 5
        1 3 finished: taken     0 2 are left for version 5, where their deadline is
        next_take 5, training:  2 * (4 + 1 - 5 + 1) = 2    0 2 are under way: none is admitted
        served 5 committed:     2 * (5 + 1 - 5 + 1) = 4    groups 4 5 admitted, deadline 6
        4 5 finished:           not taken: 0 2 would be too old for version 6. Waits for 0 2

    With staleness 0 that is `size` when the next version to train is served, and 0 from the taking of its batch to
    the commit of the next: lock-step. `depth` further limits what is under way: that many batches while one trains,
    and one more while the loop waits for a batch. Where it is less than staleness, a batch may leave slow groups out.
    """

    def __init__(self, size: int, *, staleness: int, depth: int, version: int, last: int, kept: int = 0) -> None:
        """
        Args:
            size: groups in a batch.
            staleness: most versions between the oldest that may sample a group and the one that trains on it.
            depth: batches under way beside the one that trains.
            version: version that the replicas serve, for which the next batch is taken.
            last: version that trains on the run's last batch.
            kept: number of coming batches that exist already, in the journal.
        """
        self.served = self.next_take = version
        self._size, self._staleness, self._depth, self._last, self._kept = size, staleness, depth, last, kept
        self._waiting = False
        self._deadlines: dict[int, int] = {}
        self._finished: set[int] = set()

    def free(self) -> int:
        """Number of groups that may be admitted now."""
        bound = self.served + self._staleness - self.next_take + 1
        depth = self._depth + self._waiting
        batches = min(bound, depth, self._last - self.next_take + 1) - self._kept
        return max(0, self._size * batches - len(self._deadlines))

    def admit(self, group: int) -> None:
        """Admits a group, whose number must be above those of earlier ones."""
        self._deadlines[group] = self.served + self._staleness

    def finish(self, group: int) -> None:
        """Records that all samples of a group are complete."""
        self._finished.add(group)

    def discard(self, group: int) -> None:
        """Removes a finished group that no batch will take; another may be admitted in its place."""
        self._finished.remove(group)
        del self._deadlines[group]

    def commit(self, version: int) -> None:
        """Records that all replicas serve `version` or later."""
        self.served = version

    def wait(self) -> None:
        """Records that the loop waits for a batch, as it has trained on the one before."""
        self._waiting = True

    def choose(self) -> list[int] | None:
        """The groups of the next batch, which are the lowest that are finished; None if it has to wait for others."""
        chosen = dict.fromkeys(sorted(self._finished)[: self._size])
        left = [deadline for group, deadline in self._deadlines.items() if group not in chosen]
        if len(chosen) < self._size or not in_time(left, self._size, self.next_take + 1):
            return None
        return list(chosen)

    def take(self, groups: Iterable[int]) -> None:
        """Takes the groups of a batch, as `choose` gives them."""
        for group in groups:
            del self._deadlines[group]
            self._finished.remove(group)
        self._taken()

    def take_kept(self) -> None:
        """Takes a batch that existed already."""
        self._kept -= 1
        self._taken()

    def _taken(self) -> None:
        self.next_take += 1
        self._waiting = False


def in_time(deadlines: Iterable[int], size: int, version: int) -> bool:
    """True if batches of `size`, trained on by `version` and those after it in turn, meet all deadlines."""
    return all(deadline >= version + place // size for place, deadline in enumerate(sorted(deadlines)))
