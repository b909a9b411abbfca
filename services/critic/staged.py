"""A training batch in parts, as they are held until the step that trains on them."""

import hashlib
from collections.abc import Iterable, Sequence

from quartet.columns import STRUCTURE, Columns
from quartet.config.limits import LimitsConfig
from quartet.serving.runs.timeline import Moment
from quartet.wire.errors import FailedPrecondition, ResourceExhausted


def digest(parts: Sequence[Columns], schedule: Iterable[int]) -> bytes:
    """Identifies a batch and its schedule, on which the result of a step depends, however the batch was divided."""
    total = hashlib.sha256(repr(tuple(schedule)).encode())
    structure = (*STRUCTURE, "sequence_lengths")
    for name in [*structure, *sorted(parts[0].columns)]:
        total.update(name.encode())
        for part in parts:
            total.update((getattr(part, name) if name in structure else part[name]).data)
    return total.digest()


class StagedBatch:
    """Holds the parts of the newest step's batch. They stay after the step, so that its Train may be repeated, until
    a part of a later step comes.

    For example parts at rows 0 and 512 came, of 512 and 88 trajectories: `whole` gives both as a batch of 600. If the
    first comes again in halves, at rows 0 and 256, these replace it.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        """
        Args:
            limits: on the rows and tokens of one batch.
        """
        self._limits = limits
        self._moment = Moment()
        self._parts: dict[int, Columns] = {}

    def add(self, moment: Moment, row: int, part: Columns) -> None:
        """Holds a part of the step `moment`, whose first trajectory has the place `row` in the batch.

        Raises:
            FailedPrecondition: parts of a later step have come.
            ResourceExhausted: the batch is larger than a batch may be.
        """
        if moment != self._moment:
            if (moment.timeline, moment.number) < (self._moment.timeline, self._moment.number):
                raise FailedPrecondition(
                    f"step: {moment.number} is refused, as parts of step {self._moment.number} have come since"
                )
            self._moment, self._parts = moment, {}
        kept = {at: other for at, other in self._parts.items() if at + len(other) <= row or row + len(part) <= at} | {
            row: part
        }
        rows, tokens = sum(len(one) for one in kept.values()), sum(one.tokens for one in kept.values())
        for unit, total in (("rows", rows), ("tokens", tokens)):
            if total > (most := getattr(self._limits, f"max_call_{unit}")):
                raise ResourceExhausted(f"batch: {total} {unit} in all, but a batch may hold {most} (train_limits)")
        self._parts = kept

    def whole(self, moment: Moment, rows: int) -> list[Columns]:
        """The parts of the batch of the step `moment`, in order, which hold `rows` trajectories.

        Raises:
            FailedPrecondition: some are missing, or there are more.
        """
        parts = self._parts if moment == self._moment else {}
        come = sum(len(part) for part in parts.values())
        end = max((row + len(part) for row, part in parts.items()), default=0)
        if not come == end == rows:  # parts do not overlap, so there is no gap
            raise FailedPrecondition(
                f"staged: {rows} trajectories, but {come} of step {moment.number} have come, the last in place "
                f"{end - 1}; stage all and train again"
            )
        return [parts[row] for row in sorted(parts)]
