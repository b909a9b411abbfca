"""The loop with publishing and sampling beside it: what goes on at the same time, and what each failure ends."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.learners import Update
from orchestrator.push.pusher import PushFailed
from quartet.wire.errors import Unavailable
from tests.unit.fake_run import Stage


def overlapped(folder: Path, **section: Any) -> Stage:
    return Stage(folder, **{"loop": {"max_staleness": 1}} | section)


@pytest.fixture
async def left() -> Callable[[], list[str]]:
    """Names of the tasks that are running and were not before the test: all tests share one event loop."""
    before = asyncio.all_tasks()

    def names() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]

    return names


async def test_a_version_is_delivered_while_the_next_batch_trains(policy_folder: Path) -> None:
    stage = overlapped(policy_folder, steps=3, evaluation={"every": 0})
    trained, train = asyncio.Event(), stage.policy.train

    async def told(update: Update) -> dict[str, float]:
        metrics = await train(update)
        if len(stage.policy.batches) == 2:
            trained.set()
        return metrics

    stage.policy.train = told  # type: ignore[method-assign]
    # Version 2 is delivered only after the second batch has been trained on.
    stage.pusher.gate = lambda version: trained.wait()
    async with asyncio.timeout(10):
        await stage.run()
    order = [event for event in stage.journal.events if event == "train policy" or event[0] in ("stage", "deliver")]
    assert order == [
        "train policy",
        ("stage", 2),
        "train policy",
        ("deliver", 2),
        ("stage", 3),
        *order[5:],
    ]
    # Version 4 is delivered before the run ends, and 3 before 4 is staged.
    assert order.index(("deliver", 3)) < order.index(("stage", 4)) < order.index(("deliver", 4))


async def test_what_it_trains_on_is_never_older_than_the_bound_however_long_a_delivery_takes(
    policy_folder: Path,
) -> None:
    stage = overlapped(policy_folder, steps=3, evaluation={"every": 0})

    async def slow(version: int) -> None:
        for _ in range(200):
            await asyncio.sleep(0)

    stage.pusher.gate = slow
    await stage.run(policy_version=6)
    assert [stage.log.lines[step]["policy/staleness"] for step in (1, 2, 3)] == [0, 1, 1]


async def test_an_evaluation_waits_for_its_version_and_no_push_runs_meanwhile(policy_folder: Path) -> None:
    stage = overlapped(policy_folder)
    await stage.run()
    relevant = [e for e in stage.journal.events if e[0] in ("push", "stage", "deliver", "evaluate")]
    assert relevant == [
        ("push", 1),
        ("evaluate", 0, 1),
        ("stage", 2),
        ("deliver", 2),
        ("stage", 3),
        ("deliver", 3),
        ("evaluate", 2, 3),
        ("stage", 4),
        ("deliver", 4),
        ("evaluate", 3, 4),
    ]


async def test_values_are_asked_for_beside_the_policys_log_probs(policy_folder: Path) -> None:
    stage = overlapped(policy_folder, steps=1)
    meeting = asyncio.Barrier(2)
    ask, logprobs = stage.fakes.critic.ask, stage.policy.logprobs

    async def values(*arguments: Any, **options: Any) -> Any:
        await meeting.wait()
        return await ask(*arguments, **options)

    async def own(trajectories: Any) -> Any:
        await meeting.wait()
        return await logprobs(trajectories)

    stage.fakes.critic.ask, stage.policy.logprobs = values, own  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await stage.run()
    assert sorted(stage.log.lines) == [0, 1]


async def test_a_failed_delivery_ends_the_run_at_once_with_its_own_error(
    policy_folder: Path, left: Callable[[], list[str]]
) -> None:
    stage = overlapped(policy_folder)
    stage.policy.meeting = asyncio.Barrier(1)
    stage.pusher.failure = PushFailed("version 2 after 5 attempts: a: gone")
    train, trains = stage.policy.train, iter([False, True])

    async def stuck(update: Update) -> dict[str, float]:
        if next(trains):
            await asyncio.Event().wait()
        return await train(update)

    stage.policy.train = stuck  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        with pytest.raises(PushFailed, match="version 2 after 5 attempts: a: gone"):
            await stage.run()
    assert left() == []


async def test_a_failed_update_leaves_no_task(policy_folder: Path, left: Callable[[], list[str]]) -> None:
    stage = overlapped(policy_folder, evaluation={"every": 0})
    stage.pusher.gate = lambda version: asyncio.Event().wait()  # never delivered
    train, trains = stage.policy.train, iter([None, Unavailable("the learner is gone")])

    async def failing(update: Update) -> dict[str, float]:
        if failure := next(trains):
            raise failure
        return await train(update)

    stage.policy.train = failing  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as caught:
            await stage.run()
    assert [str(error) for error in caught.value.exceptions] == ["the learner is gone"]
    assert left() == []


async def test_a_run_that_is_cancelled_leaves_no_task(policy_folder: Path, left: Callable[[], list[str]]) -> None:
    stage = overlapped(policy_folder, evaluation={"every": 0})
    stage.pusher.gate = lambda version: asyncio.Event().wait()
    run = asyncio.create_task(stage.run())
    async with asyncio.timeout(10):
        while len(stage.policy.batches) < 2:
            await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert left() == []
