"""Rows that are worked on one by one: how many at a time, and whose come next."""

import asyncio
from typing import Any

import numpy as np
import pytest

from quartet.config.limits import LimitsConfig
from quartet.serving.guests import Guests
from quartet.serving.share import Share
from quartet.serving.slots import SURPLUS, EngineSlots, Running
from quartet.wire.callers import Purpose
from tests.unit.waiting import settled, until

RUN, OTHER_RUN = Share("run", Purpose.TRAINING), Share("other run", Purpose.TRAINING)
EVALUATION, FOREIGN = Share("run", Purpose.EVALUATION), Share("judge", Purpose.FOREIGN)


class Engine:
    """Works on rows until it is told that they end."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ends: dict[tuple[str, int], asyncio.Future[str]] = {}

    def call(self, slots: EngineSlots, share: Share, rows: int, name: str = "") -> Running[str]:
        name = name or f"{share.name}/{share.purpose.name}"

        async def start(row: int) -> str:
            self.begun.append((name, row))
            self.ends[name, row] = asyncio.get_running_loop().create_future()
            try:
                return await self.ends[name, row]
            finally:
                del self.ends[name, row]

        return slots.enter(share, np.full(rows, 4, np.int32), start)

    def end(self, name: str, row: int) -> None:
        self.ends[name, row].set_result(f"{name}:{row}")

    def count(self, name: str) -> int:
        return sum(begun == name for begun, _ in self.begun)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def slots() -> EngineSlots:
    return EngineSlots(8, LimitsConfig(), quantum=4)


async def test_training_has_all_slots_and_the_next_rows_ready(engine: Engine, slots: EngineSlots) -> None:
    running = engine.call(slots, RUN, 100)
    await settled()
    assert len(engine.begun) == 8 * SURPLUS
    engine.end("run/TRAINING", 3)
    [task] = await running.finished(1)
    assert task.result() == "run/TRAINING:3"
    await settled()
    assert len(engine.begun) == 8 * SURPLUS + 1
    await running.close()
    assert engine.ends == {}


async def test_others_leave_training_its_reserve_and_a_foreign_caller_has_its_share(
    engine: Engine, slots: EngineSlots
) -> None:
    foreign = engine.call(slots, FOREIGN, 1000)
    await settled()
    assert engine.count("judge/FOREIGN") == 4
    evaluation = engine.call(slots, EVALUATION, 1000)
    await settled()
    assert engine.count("run/EVALUATION") == 2
    # A run that comes now finds room at once.
    training = engine.call(slots, RUN, 4)
    await settled()
    assert engine.count("run/TRAINING") == 4
    # What ends makes room for evaluation before foreign callers, but these are not forgotten.
    for row in range(4):
        engine.end("judge/FOREIGN", row)
    await settled()
    assert engine.count("run/EVALUATION") == 6
    for row in range(6):
        engine.end("run/EVALUATION", row)
    await settled()
    assert engine.count("judge/FOREIGN") > 4
    for running in (foreign, evaluation, training):
        await running.close()
    assert engine.ends == {}


async def test_two_runs_share_the_slots_however_large_their_calls(engine: Engine, slots: EngineSlots) -> None:
    large = engine.call(slots, RUN, 1000)
    await settled()
    small = [engine.call(slots, OTHER_RUN, 4, f"small {index}") for index in range(4)]
    for _ in range(16):
        engine.end(*next(key for key in engine.ends if key[0] == "run/TRAINING"))
        await settled()
    assert sum(engine.count(f"small {index}") for index in range(4)) == 8
    for running in (large, *small):
        await running.close()


async def test_a_call_that_is_closed_frees_what_it_had(engine: Engine, slots: EngineSlots) -> None:
    running = engine.call(slots, RUN, 100)
    await settled()
    await running.close()
    after = engine.call(slots, OTHER_RUN, 3)
    await until(lambda: engine.count("other run/TRAINING") == 3)
    assert len(engine.begun) == 8 * SURPLUS + 3
    for row in range(3):
        engine.end("other run/TRAINING", row)
    done: list[Any] = await after.finished(5, all_of_them=True)
    assert (len(done), after.left) == (3, 0)


async def test_silence_is_an_empty_answer(engine: Engine, slots: EngineSlots) -> None:
    running = engine.call(slots, RUN, 1)
    assert await running.finished(0.01) == []
    assert running.left == 1
    await running.close()


async def test_a_run_that_holds_the_engine_is_not_kept_waiting_by_guests(engine: Engine) -> None:
    """One of 8 slots, and then none until the time that the row took is made up for."""
    now, held = [0.0], [True]
    guests = Guests(0.1, lambda: held[0], gpus=0.5, clock=lambda: now[0])
    slots = EngineSlots(8, LimitsConfig(), 4, guests)
    foreign = engine.call(slots, FOREIGN, 100)
    training = engine.call(slots, RUN, 3)
    await settled()
    assert [engine.count(name) for name in ("judge/FOREIGN", "run/TRAINING")] == [1, 3]
    now[0] += 10
    engine.end("judge/FOREIGN", 0)
    await settled()
    assert engine.count("judge/FOREIGN") == 1
    # A quarter of 10 s was the row's, which is a tenth of 25.
    now[0] += 16
    engine.end("run/TRAINING", 0)
    await settled()
    assert engine.count("judge/FOREIGN") == 2
    held[0] = False
    engine.end("run/TRAINING", 1)
    await settled()
    assert engine.count("judge/FOREIGN") == 1 + 4
    for running in (foreign, training):
        await running.close()


async def test_guests_start_by_themselves_when_their_time_has_come(engine: Engine) -> None:
    guests = Guests(0.5, lambda: True)
    slots = EngineSlots(8, LimitsConfig(), 4, guests)
    while not guests.wait_s:
        guests.begin()
    foreign = engine.call(slots, FOREIGN, 1)
    await settled()
    assert engine.begun == []
    await until(lambda: engine.begun == [("judge/FOREIGN", 0)])
    await foreign.close()
