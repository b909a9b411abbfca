"""Trajectories that no service can take, and what each must be told. The model: 335 rows, 128 tokens."""

import numpy as np

from quartet.columns import Columns
from tests.trajectories import of


def pairs(prompts: list[list[int]], responses: list[list[int]], **columns: list[list[float]]) -> bytes:
    """Packed trajectories of prompts and responses."""
    return of(prompts, responses, **columns).pack()


ONE = pairs([[5]], [[6]])
"""Nothing wrong with it."""


def _changed(lengths: list[int], sampled: list[bool] | None = None) -> bytes:
    """Two trajectories of two tokens, with other lengths or marks in their places."""
    whole = pairs([[5], [5]], [[6], [6]])
    at = len(whole) - 4 - 8
    marks = np.asarray(sampled or [False, True] * 2).tobytes()
    return whole[:at] + np.asarray(lengths, "<i4").tobytes() + marks


MALFORMED = {
    "nothing": (b"", ": empty; send at least one trajectory"),
    "no trajectories": (Columns.of_pairs([], []).pack(), ": empty; send at least one trajectory"),
    "not columns": (b"12345", ": 5 bytes that do not begin with a header"),
    "cut off": (ONE[:-1], f": {len(ONE) - 1} bytes, but its header says {len(ONE)}"),
    "no prompt tokens": (
        _changed([2, 2], [True, False, False, True]),
        ".sampled: trajectory 0 begins with a sampled",
    ),
    "no response tokens": (
        Columns.of(np.ones(2, np.int32), np.asarray([2], np.int32), np.zeros(2, np.bool_)).pack(),
        ".sampled: trajectory 0 has no sampled token",
    ),
    "negative length": (_changed([5, -1]), ".lengths[1]: -1; every trajectory needs at least 1"),
    "lengths and ids disagree": (_changed([3, 3]), ".ids: 4 for 6 tokens (lengths)"),
    "huge length": (_changed([2**31 - 1] * 2), ".ids: 4 for 4294967294 tokens (lengths)"),
    "id beyond the vocabulary": (pairs([[5]], [[7, 335]]), ".ids[2]: 335 is outside the voc"),
    "negative id": (pairs([[-1]], [[7]]), ".ids[0]: -1 is outside the vocabulary (0 to 334)"),
    "too long": (pairs([[5], [5] * 100], [[6], [6] * 29]), ".lengths[1]: 129 tokens exceed the model's"),
    "another column": (pairs([[5]], [[6]], surprise=[[1.0]]), ".surprise: not expected"),
}
