"""Prompts and responses of random words, and numbers and marks for their tokens."""

from collections.abc import Sequence

import numpy as np

from quartet.wire.codec import Bools, Floats, Ints


def ids(*tokens: int) -> Ints:
    return np.asarray(tokens, np.int32)


def pairs(count: int, seed: int = 7) -> tuple[list[Ints], list[Ints]]:
    """Prompts of 1 to 9 tokens and responses of 1 to 24, over 60 words."""
    draw = np.random.default_rng(seed)

    def rows(longest: int) -> list[Ints]:
        return [draw.integers(4, 64, draw.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]

    return rows(9), rows(24)


def grouped(count: int, size: int = 7) -> tuple[list[Ints], list[Ints]]:
    """Responses of `pairs`, of which each `size` that follow each other have one prompt of 30 tokens."""
    draw = np.random.default_rng(11)
    prompts = [draw.integers(4, 64, 30).astype(np.int32) for _ in range(-(-count // size))]
    return [prompts[i // size].copy() for i in range(count)], pairs(count)[1]


def marks(rows: Sequence[Ints]) -> list[Bools]:
    """About half of the tokens, and none of every third row."""
    draw = np.random.default_rng(5)
    return [(draw.random(len(row)) < 0.5) & (index % 3 > 0) for index, row in enumerate(rows)]


def noise(rows: Sequence[Ints], seed: int, around: Sequence[Floats] | None = None) -> list[Floats]:
    """Normal numbers for each token, about `around` or 0."""
    draw = np.random.default_rng(seed)
    made = [draw.normal(0, 0.3, len(row)).astype(np.float32) for row in rows]
    return made if around is None else [a + b for a, b in zip(around, made, strict=True)]
