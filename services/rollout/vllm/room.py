"""Room in the KV cache for requests until they end, so that none has to make room for another. Pure functions."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

FREEING_STEPS = 2
"""Engine steps after a request's last token until its blocks are free, while others go on."""


class Need(NamedTuple):
    """Tokens of one request in the KV cache."""

    now: int
    """Tokens that it holds, or that it holds once it has started."""
    left: int
    """Most tokens that it may still sample."""


def most_blocks(needs: Sequence[Need], block_size: int) -> int:
    """Most blocks that these requests may hold at any time from now on.

    All of them sample a token per step, and each at most until its `left` is used up; then its blocks are free. A
    request that ends earlier only makes it less. So the most is held just before one of them must end, by all that
    may go on as long. With blocks of 10 tokens, two requests hold 60 and 10 tokens, and may sample 10 and 90 more:

        in 10 steps    70 + 20 tokens in 9 blocks, or one more for each if its last block is not full
        in 90 steps        100 tokens in 10 blocks
        at the end of both, if none ended before the other: 170 tokens, which never comes to be
    """
    if not needs:
        return 0
    now, left = np.asarray(needs, np.int64).T
    order = np.argsort(-left, kind="stable")
    steps = left[order] + FREEING_STEPS
    count = np.arange(1, len(needs) + 1)
    tokens = np.cumsum(now[order]) + count * steps
    return int((tokens // block_size + count).max())


def startable(running: Iterable[Need], waiting: Iterable[Need], blocks: int, block_size: int) -> int:
    """Number of waiting requests, from the first, that fit into the cache beside the running ones until they end.

    At least one if none runs, because one alone always fits.
    """
    needs = list(running)
    before = len(needs)
    for need in waiting:
        needs.append(need)
        if len(needs) > 1 and most_blocks(needs, block_size) > blocks:
            return len(needs) - 1 - before
    return len(needs) - before
