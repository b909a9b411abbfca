"""A replica whose engine stands still says so, instead of telling its callers that it is busy."""

import asyncio
from typing import cast

import pytest

from quartet.wire.errors import Unavailable
from services.rollout.call import HEARTBEAT_S
from services.rollout.pulse import STILL_S, Pulse
from tests.unit.services.rollout.test_rollout_replica import FakeEngine, start
from tests.unit.virtual_time import VirtualLoop, in_virtual_time

NOT_ANSWERING = "the engine of this replica does not answer"


class Asked:
    """An engine's process: answers at once, or stands still."""

    def __init__(self) -> None:
        self.frozen = self.busy = False
        self.times = 0
        self.goes_on = asyncio.Event()

    async def answer(self) -> None:
        self.times += 1
        if self.frozen:
            await self.goes_on.wait()

    @property
    def pulse(self) -> Pulse:
        return Pulse(self.answer, lambda: self.busy)


async def beats(pulse: Pulse, seconds: float) -> None:
    """Beats as a call does that waits for samples."""
    for _ in range(int(seconds / HEARTBEAT_S)):
        await asyncio.sleep(HEARTBEAT_S)
        pulse.beat()


@in_virtual_time
async def test_an_engine_that_answers_is_asked_at_each_beat() -> None:
    asked = Asked()
    await beats(asked.pulse, 60)
    await asyncio.sleep(0)  # the last question
    assert asked.times == 60 / HEARTBEAT_S


@in_virtual_time
async def test_one_that_stands_still_is_asked_once_and_found_until_it_goes_on() -> None:
    asked = Asked()
    pulse, asked.frozen = asked.pulse, True
    began = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        await beats(pulse, 60)
    assert STILL_S < asyncio.get_running_loop().time() - began <= STILL_S + 2 * HEARTBEAT_S
    assert asked.times == 1
    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        pulse.beat()  # of another call, which need not wait as long
    asked.frozen = False
    asked.goes_on.set()
    await beats(pulse, 10)


@in_virtual_time
async def test_an_engine_of_long_steps_ends_its_calls_once() -> None:
    """Otherwise its callers would begin the same step again and again."""
    step_s = 3 * STILL_S
    times = 0

    async def answer() -> None:
        nonlocal times
        times += 1
        await asyncio.sleep(step_s)

    pulse = Pulse(answer, lambda: False)
    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        await beats(pulse, step_s)
    await asyncio.sleep(step_s)
    await beats(pulse, 10 * step_s)
    assert times > 5


@in_virtual_time
async def test_a_phase_of_a_push_may_take_longer_than_an_answer() -> None:
    asked = Asked()
    pulse, asked.frozen, asked.busy = asked.pulse, True, True
    await beats(pulse, 60)
    asked.busy = False
    await beats(pulse, STILL_S)
    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        await beats(pulse, 2 * HEARTBEAT_S)


@in_virtual_time
async def test_that_this_process_was_busy_is_not_the_engines_silence() -> None:
    asked, loop = Asked(), cast(VirtualLoop, asyncio.get_running_loop())
    pulse, asked.frozen = asked.pulse, True
    await beats(pulse, 2 * HEARTBEAT_S)
    loop.now += 5 * STILL_S  # nothing could be read
    pulse.beat()
    pulse.beat()  # of another call
    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        await beats(pulse, STILL_S)


@in_virtual_time
async def test_an_engine_that_died_is_found_at_the_next_beat() -> None:
    async def died() -> None:
        raise RuntimeError("EngineDeadError")

    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        await beats(Pulse(died, lambda: False), 2 * HEARTBEAT_S)


@in_virtual_time
async def test_the_callers_of_an_engine_that_stands_still_are_sent_elsewhere() -> None:
    """Once they heard that it was busy, until Serve had replaced the replica."""
    engine, asked = FakeEngine(), Asked()
    pulse, asked.frozen = asked.pulse, True
    began = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match=NOT_ANSWERING):
        [answer async for answer in start(engine, 2, beat=pulse.beat)]
    assert asyncio.get_running_loop().time() - began < STILL_S + 3 * HEARTBEAT_S
    assert sorted(engine.cancelled) == [0, 1]


@in_virtual_time
async def test_samples_that_come_late_are_heard_from_an_engine_that_answers() -> None:
    engine, asked = FakeEngine(), Asked()
    loop = asyncio.get_running_loop()
    loop.call_later(60, engine.finish, 0)
    answers = [answer async for answer in start(engine, 1, beat=asked.pulse.beat)]
    assert [each.index for answer in answers for each in answer.segments] == [0]
