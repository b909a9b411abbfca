"""A training batch in parts: as they arrive, as they are held until the step that trains on them, and whole."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet.config.limits import LimitsConfig
from quartet.serving.runs.timeline import Moment
from quartet.wire.codec import Bools, Floats, Ints, PackedPairs, unpack_bools, unpack_finite
from quartet.wire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quartet.wire.ragged import Ragged


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some pairs of a batch. Each field is one piece of memory, however many pairs there are, so that a part is
    quickly checked and sent to the ranks."""

    prompts: Ragged
    """Token ids, B times [P]."""
    responses: Ragged
    """Token ids, B times [T]."""
    values: Floats
    """[sum of T] values from before the update."""
    returns: Floats
    """[sum of T] returns."""
    trained: Bools
    """[sum of T] True at the tokens that are trained on."""

    @classmethod
    def of(
        cls,
        packed: PackedPairs,
        values: bytes,
        returns: bytes,
        trained: bytes = b"",
        *,
        vocab_size: int,
        max_length: int,
    ) -> "BatchPart":
        """The part that these bytes hold; without `trained` all tokens are trained on. InvalidArgument if they do not
        fit each other or the model."""
        prompts, responses = packed.unpack(vocab_size=vocab_size, max_length=max_length)
        tokens = len(responses.ids)
        numbers = unpack_finite(values, "values"), unpack_finite(returns, "returns")
        marks = unpack_bools(trained, "trained") if trained else np.ones(tokens, np.bool_)
        for given, field in zip((*numbers, marks), ("values", "returns", "trained"), strict=True):
            if len(given) != tokens:
                raise InvalidArgument(
                    f"{field}: {len(given)} values for {tokens} response tokens; there must be one per token"
                )
        return cls(prompts, responses, *numbers, marks)

    @classmethod
    def joined(cls, parts: Sequence["BatchPart"]) -> "BatchPart":
        """The pairs of all parts, in order."""
        prompts, responses = (
            Ragged(np.concatenate([side.ids for side in sides]), np.concatenate([side.lengths for side in sides]))
            for sides in ([part.prompts for part in parts], [part.responses for part in parts])
        )
        return cls(
            prompts,
            responses,
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.returns for part in parts]),
            np.concatenate([part.trained for part in parts]),
        )

    @property
    def rows(self) -> int:
        """Number of pairs."""
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        """Number of tokens of prompts and responses."""
        return len(self.prompts.ids) + len(self.responses.ids)


def digest(parts: Sequence[BatchPart], schedule: Iterable[int]) -> bytes:
    """Identifies a batch and its schedule, on which the result of a step depends, however the batch was divided."""
    total = hashlib.sha256(repr(tuple(schedule)).encode())
    fields: list[Callable[[BatchPart], Ints | Floats | Bools]] = [
        lambda part: part.prompts.lengths,
        lambda part: part.responses.lengths,
        lambda part: part.prompts.ids,
        lambda part: part.responses.ids,
        lambda part: part.values,
        lambda part: part.returns,
        lambda part: part.trained,
    ]
    for field in fields:
        for part in parts:
            total.update(field(part).data)
    return total.digest()


class StagedBatch:
    """Holds the parts of the newest step's batch. They stay after the step, so that its Train may be repeated, until
    a part of a later step comes.

    For example parts at rows 0 and 512 came, of 512 and 88 pairs: `whole` gives both as a batch of 600 pairs. If the
    first comes again in halves, at rows 0 and 256, these replace it.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        """
        Args:
            limits: on the rows and tokens of one batch.
        """
        self._limits = limits
        self._moment = Moment()
        self._parts: dict[int, BatchPart] = {}

    def add(self, moment: Moment, row: int, part: BatchPart) -> None:
        """Holds a part of the step `moment`, whose first pair has the place `row` in the batch.

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
        kept = {at: other for at, other in self._parts.items() if at + other.rows <= row or row + part.rows <= at} | {
            row: part
        }
        for unit in ("rows", "tokens"):
            total, most = sum(getattr(one, unit) for one in kept.values()), getattr(self._limits, f"max_call_{unit}")
            if total > most:
                raise ResourceExhausted(f"pairs: {total} {unit} in all, but a batch may hold {most} (train_limits)")
        self._parts = kept

    def whole(self, moment: Moment, rows: int) -> list[BatchPart]:
        """The parts of the batch of the step `moment`, in order, which hold `rows` pairs.

        Raises:
            FailedPrecondition: some are missing, or there are more.
        """
        parts = self._parts if moment == self._moment else {}
        come = sum(part.rows for part in parts.values())
        end = max((row + part.rows for row, part in parts.items()), default=0)
        if not come == end == rows:  # parts do not overlap, so there is no gap
            raise FailedPrecondition(
                f"staged: {rows} pairs, but {come} of step {moment.number} have come, the last in place {end - 1}; "
                "stage all and train again"
            )
        return [parts[row] for row in sorted(parts)]
