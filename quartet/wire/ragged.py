"""Token sequences of any lengths in one buffer, read through views without copies."""

from collections.abc import Iterator, Sequence
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Ragged(Sequence[Ints]):
    """B sequences end to end in one array. Each element is a view of that array, made on access.

    A view takes about 100 bytes besides the 4 bytes of each token. A list of views of a million short sequences would
    therefore be many times as large as the message; a Ragged is as large as the message.
    """

    def __init__(self, ids: Ints, lengths: Ints) -> None:
        """
        Args:
            ids: [sum of lengths] tokens of all sequences.
            lengths: [B] number of tokens of each sequence.
        """
        self.ids = ids
        self.ends: Ints = np.cumsum(lengths, dtype=np.int32)

    @classmethod
    def of(cls, sequences: Sequence[Ints]) -> Self:
        """Copies the sequences, each [T], into one buffer."""
        ids = np.concatenate([np.empty(0, np.int32), *sequences]).astype(np.int32, copy=False)
        return cls(ids, np.asarray([len(sequence) for sequence in sequences], np.int32))

    @property
    def lengths(self) -> Ints:
        """[B] number of tokens of each sequence."""
        return np.diff(self.ends, prepend=np.int32(0))

    def bounds(self, row: int) -> tuple[int, int]:
        """Begin and end of a row in `ids`."""
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Ints: ...

    @overload
    def __getitem__(self, index: slice) -> "Ragged": ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._rows(range(*index.indices(len(self))))
        start, end = self.bounds(range(len(self))[index])
        return self.ids[start:end]

    def _rows(self, rows: range) -> "Ragged":
        """A view where the rows lie side by side, else a copy."""
        if rows.step != 1 or not len(rows):
            return Ragged.of([self[row] for row in rows])
        start, end = self.bounds(rows[0])[0], self.bounds(rows[-1])[1]
        return Ragged(self.ids[start:end], self.lengths[rows.start : rows.stop])

    def __iter__(self) -> Iterator[Ints]:
        start = 0
        for end in self.ends.tolist():
            yield self.ids[start:end]
            start = end
