"""Pieces of work in turn, with other work of the event loop between them."""

import asyncio

import pytest

from quartet.serving.in_turn import AT_ONCE, InTurn


async def test_others_are_answered_between_two_pieces() -> None:
    order: list[str] = []
    line = InTurn()

    async def others() -> None:
        while len(order) < 9:
            order.append("other")
            await asyncio.sleep(0)

    pieces = [line.do(lambda number=number: order.append(f"piece {number}"), AT_ONCE + 1) for number in range(4)]  # type: ignore[misc]
    await asyncio.gather(*pieces, others())
    assert [each for each in order if each != "other"] == [f"piece {number}" for number in range(4)]
    assert "piece 0 piece 1" not in " ".join(order)
    assert all("other" in order[order.index(f"piece {n}") : order.index(f"piece {n + 1}")] for n in range(3))


async def test_small_pieces_do_not_wait_and_failures_end_the_turn() -> None:
    line, held = InTurn(), asyncio.Event()

    async def small() -> str:
        return await line.do(lambda: "small", AT_ONCE)

    def fail() -> None:
        held.set()
        raise ValueError("no")

    failing = asyncio.ensure_future(line.do(fail, AT_ONCE + 1))
    assert await small() == "small"
    assert not held.is_set()
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await line.do(lambda: "large", AT_ONCE + 1) == "large"
