"""A training step happens once, however often and however soon it is asked for again."""

import asyncio
from typing import Any

import pytest

from quartet.wire.errors import FailedPrecondition
from services.critic.once import Once
from tests.unit.waiting import settled


class Trainer:
    """Trains a step when its gate opens; notes each beginning."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.running = 0
        self.gate = asyncio.Event()
        self.failures: list[Exception] = []

    def __call__(self, step: int) -> Any:
        async def train() -> str:
            self.begun.append(step)
            self.running += 1
            assert self.running == 1
            await self.gate.wait()
            self.running -= 1
            if self.failures:
                raise self.failures.pop(0)
            return f"trained {step}"

        return train


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def allowed() -> None:
    """The caller may still begin a step."""


def ask(once: Once[str], trainer: Trainer, step: int) -> "asyncio.Task[str]":
    return asyncio.create_task(once.run(step, b"batch", trainer(step), allowed))


async def test_the_same_step_trains_once(trainer: Trainer) -> None:
    once: Once[str] = Once()
    trainer.gate.set()
    assert once.last_step == 0
    assert [await once.run(step, b"batch", trainer(step), allowed) for step in (1, 1, 3, 3, 3)] == [
        "trained 1",
        "trained 1",
        "trained 3",
        "trained 3",
        "trained 3",
    ]
    assert trainer.begun == [1, 3]
    assert once.last_step == 3


async def test_the_same_step_at_the_same_time_trains_once(trainer: Trainer) -> None:
    once: Once[str] = Once()
    asked = [ask(once, trainer, 1), ask(once, trainer, 1)]
    await settled()
    trainer.gate.set()
    assert await asyncio.gather(*asked) == ["trained 1", "trained 1"]
    assert trainer.begun == [1]


async def test_a_step_that_several_wait_to_begin_trains_once_and_never_beside_another(trainer: Trainer) -> None:
    once: Once[str] = Once()
    asked = [ask(once, trainer, 1), ask(once, trainer, 2), ask(once, trainer, 2), ask(once, trainer, 2)]
    await settled()
    assert trainer.begun == [1]
    trainer.gate.set()
    assert await asyncio.gather(*asked) == ["trained 1", "trained 2", "trained 2", "trained 2"]
    assert trainer.begun == [1, 2]


async def test_an_older_step_is_refused(trainer: Trainer) -> None:
    once: Once[str] = Once()
    trainer.gate.set()
    await once.run(4, b"batch", trainer(4), allowed)
    with pytest.raises(FailedPrecondition, match="step: 3 is older than the last one trained, 4"):
        await once.run(3, b"batch", trainer(3), allowed)
    assert trainer.begun == [4]


async def test_a_step_that_became_old_while_it_waited_is_refused(trainer: Trainer) -> None:
    once: Once[str] = Once()
    asked = [ask(once, trainer, 1), ask(once, trainer, 3), ask(once, trainer, 2)]
    await settled()
    trainer.gate.set()
    actual = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(result) for result in actual[:2]] == ["trained 1", "trained 3"]
    assert isinstance(actual[2], FailedPrecondition)
    assert trainer.begun == [1, 3]


async def test_a_step_that_failed_may_be_tried_again(trainer: Trainer) -> None:
    once: Once[str] = Once()
    trainer.gate.set()
    trainer.failures.append(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        await once.run(2, b"batch", trainer(2), allowed)
    # The failure does not open the way back to older steps.
    with pytest.raises(FailedPrecondition):
        await once.run(1, b"batch", trainer(1), allowed)
    assert await once.run(2, b"batch", trainer(2), allowed) == "trained 2"
    assert trainer.begun == [2, 2]


async def test_a_caller_that_goes_away_does_not_stop_a_step(trainer: Trainer) -> None:
    once: Once[str] = Once()
    first = ask(once, trainer, 1)
    await settled()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    again = ask(once, trainer, 1)
    await settled()
    trainer.gate.set()
    assert await again == "trained 1"
    assert trainer.begun == [1]


async def test_what_was_trained_before_a_restoration_is_not_trained_again(trainer: Trainer) -> None:
    once: Once[str] = Once()
    trainer.gate.set()
    await once.run(5, b"batch", trainer(5), allowed)
    once.restored(3)
    with pytest.raises(FailedPrecondition, match="step: 3 was trained before a checkpoint was restored"):
        await once.run(3, b"batch", trainer(3), allowed)
    assert await once.run(4, b"batch", trainer(4), allowed) == "trained 4"
    assert trainer.begun == [5, 4]


async def test_another_batch_under_the_same_step_is_refused_and_not_answered_with_the_first_ones_result(
    trainer: Trainer,
) -> None:
    once: Once[str] = Once()
    first = ask(once, trainer, 5)
    await settled()
    for _ in ("while it trains", "afterwards"):
        with pytest.raises(FailedPrecondition, match="step: 5 was trained on another batch"):
            await once.run(5, b"another", trainer(5), allowed)
        trainer.gate.set()
        assert await first == "trained 5"
    assert trainer.begun == [5]


async def test_a_caller_that_lost_its_right_while_it_waited_begins_nothing(trainer: Trainer) -> None:
    once: Once[str] = Once()
    lost: list[bool] = []

    def check() -> None:
        if lost:
            raise FailedPrecondition("lease: lost")

    first = ask(once, trainer, 1)
    await settled()
    second = asyncio.create_task(once.run(2, b"batch", trainer(2), check))
    await settled()
    lost.append(True)
    trainer.gate.set()
    with pytest.raises(FailedPrecondition, match="lease: lost"):
        await second
    assert (await first, trainer.begun, once.last_step) == ("trained 1", [1], 1)
