"""Turns at the desk: one at a time, and none waits for all of another caller's."""

import asyncio

import pytest

from quartet.config.limits import LimitsConfig
from quartet.serving.desk import Desk
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from tests.unit.waiting import settled

ME, OTHER = Share("me", Purpose.FOREIGN), Share("other", Purpose.FOREIGN)


async def test_callers_take_turns_one_at_a_time() -> None:
    desk, order, held = Desk(LimitsConfig()), [], [0]

    async def prepare(share: Share, size: int) -> None:
        async with desk.turn(share, size) as leave:
            held[0] += 1
            assert held[0] == 1
            await asyncio.sleep(0)
            order.append(share.name)
            held[0] -= 1
            leave()

    mine = [asyncio.create_task(prepare(ME, 2 << 20)) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(prepare(OTHER, 100), *mine)
    assert order.index("other") <= 3
    assert len(order) == 21


async def test_a_turn_ends_before_its_context_if_it_is_left_and_with_it_otherwise() -> None:
    desk = Desk(LimitsConfig())
    async with desk.turn(ME, 10) as leave:
        leave()
        async with asyncio.timeout(30), desk.turn(ME, 1 << 40):
            waiting = asyncio.create_task(_enter(desk))
            await settled()
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])
        with pytest.raises(RuntimeError):
            async with desk.turn(ME, 10):
                raise RuntimeError
        async with asyncio.timeout(30), desk.turn(OTHER, 10):
            pass


async def _enter(desk: Desk) -> None:
    async with desk.turn(OTHER, 10):
        raise AssertionError("two turns at a time")
