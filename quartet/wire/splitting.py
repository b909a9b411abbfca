"""Division of large calls into parts that a service admits; the results are joined in order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from quartet.wire.errors import ResourceExhausted

Item = TypeVar("Item")
Result = TypeVar("Result")

PAIRS = 512
"""Most pairs in one call."""
TOKENS = 1 << 17
"""Most tokens in one call; a longer pair is sent alone."""
PARTS_AT_ONCE = 4
"""Parts of one call that are in flight at the same time."""


def some(values: Sequence[Item], rows: range) -> Sequence[Item]:
    """The values of these rows; an empty sequence stays empty."""
    return values[rows.start : rows.stop]


def parts(sizes: Sequence[int], *, pairs: int = PAIRS, tokens: int = TOKENS) -> list[range]:
    """Ranges of rows that are sent together: in order, each of at most that many pairs and tokens.

    For example sizes [60, 50, 10] with tokens=100 give rows 0..0 and 1..2. No rows give one empty range.
    """
    divided, begin, total = [], 0, 0
    for row, size in enumerate(sizes):
        if row > begin and (row - begin == pairs or total + size > tokens):
            divided.append(range(begin, row))
            begin, total = row, 0
        total += size
    return [*divided, range(begin, len(sizes))]


async def in_parts(sizes: Sequence[int], ask: Callable[[range], Awaitable[Result]]) -> list[Result]:
    """The results of `ask` for all rows, one per part, in the rows' order; the first failure cancels the other parts.

    A part that the service refuses for its size is asked again in halves.

    Args:
        sizes: number of tokens of each row.
        ask: sends the rows it is given; raises ResourceExhausted without `retry_after_s` if they are more than the
            service ever admits.
    """
    turn = asyncio.Semaphore(PARTS_AT_ONCE)

    async def asked(rows: range) -> list[Result]:
        try:
            async with turn:
                return [await ask(rows)]
        except ResourceExhausted as error:
            if error.retry_after_s is not None or len(rows) < 2:
                raise
        middle = len(rows) // 2
        return await asked(rows[:middle]) + await asked(rows[middle:])

    tasks = [asyncio.ensure_future(asked(rows)) for rows in parts(sizes)]
    try:
        return [result for results in await asyncio.gather(*tasks) for result in results]
    finally:
        for task in tasks:
            task.cancel()
