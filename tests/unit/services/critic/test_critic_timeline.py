"""Steps of a critic and the timelines of its runs: what is later answers, what is abandoned is named."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from protos import critic_pb2 as pb
from quartet.wire.codec import unpack_longs
from quartet.wire.errors import FailedPrecondition, OffTimeline, ServiceError
from tests.unit.contexts import Context
from tests.unit.critic_calls import OURS, PAIRS, adopt, checkpoint, claim, start, train, values
from tests.unit.waiting import settled

pytestmark = pytest.mark.processes

BACK = common_pb2.Lease(run_id="ours", number=5)
"""Our run's lease after it went back to a checkpoint."""


async def steps(critic: Any, min_step: int, lease: common_pb2.Lease = OURS) -> list[int]:
    reply = await critic.Values(pb.ValuesRequest(trajectories=PAIRS, min_step=min_step, lease=lease), Context())
    return [int(step) for step in unpack_longs(reply.steps, "steps")]


async def test_a_later_step_answers_and_says_which_it_is(critic: Any) -> None:
    for step in (1, 2):
        await train(critic, step, step - 1)
    for least in (0, 1, 2):
        assert set(await steps(critic, least)) == {2}
    with pytest.raises(FailedPrecondition, match="min_step: 3 asked, but this critic has trained 2 so far"):
        await steps(critic, 3)


async def test_values_asked_for_while_a_step_is_trained_are_those_before_or_after_it(critic: Any) -> None:
    """Such calls used to be refused, and a run that was refused threw its progress away."""
    gate, began, ask = asyncio.Event(), asyncio.Event(), critic._critic._ask

    async def gated(*arguments: Any, **options: Any) -> Any:
        began.set()
        await gate.wait()
        return await ask(*arguments, **options)

    critic._critic._ask = gated
    training = asyncio.create_task(train(critic, 1, 0))
    await began.wait()
    asked = asyncio.create_task(steps(critic, 0))
    with pytest.raises(FailedPrecondition, match="min_step: 1 asked, but this critic has trained 0 so far"):
        await steps(critic, 1)
    gate.set()
    await training
    assert set(await asked) == set(await steps(critic, 1)) == {1}


async def test_after_a_return_to_a_checkpoint_the_steps_since_are_abandoned_until_it_is_restored(critic: Any) -> None:
    await train(critic, 1, 0)
    await checkpoint(critic, "Take", last_step=1)
    await checkpoint(critic, "Write")
    kept = await values(critic, 1)
    for step in (2, 3):
        await train(critic, step, step - 1)
    await claim(critic, BACK)
    said = r"^timeline: this critic holds step 3 of an abandoned timeline \(4\); the run is at timeline 5$"
    calls = (values(critic, 1, BACK), train(critic, 4, 3, lease=BACK), train(critic, 3, 2, lease=BACK))
    for call in (*calls, checkpoint(critic, "Take", last_step=3, lease=BACK)):
        with pytest.raises(OffTimeline, match=said):
            await call
    assert await checkpoint(critic, "Restore", lease=BACK) == 1
    assert (await values(critic, 1, BACK)).tolist() == kept.tolist()
    with pytest.raises(FailedPrecondition, match="min_step: 3 asked, but this critic has trained 1 so far"):
        await values(critic, 3, BACK)


async def test_a_run_that_begins_with_a_critic_as_it_is_says_with_which_step(critic: Any) -> None:
    await train(critic, 1, 0)
    await claim(critic, BACK)
    with pytest.raises(FailedPrecondition, match="last_step: 0 expected, but this critic has trained 1"):
        await adopt(critic, 0, BACK)
    await adopt(critic, 1, BACK)
    assert set(await steps(critic, 1, BACK)) == {1}
    info = await critic.Info(common_pb2.InfoRequest(), Context())
    assert (info.last_step, info.timeline) == (1, 5)


async def test_a_critic_that_was_replaced_is_of_no_timeline_even_at_the_same_step(
    critic: Any, reward_folder: Path, root: Path
) -> None:
    again = await start(reward_folder, root)
    try:
        said = "this critic holds step 0 of no timeline, having just started or .*; the run is at timeline 4"
        for call in (values(again, 0), train(again, 1, 0)):
            with pytest.raises(OffTimeline, match=said):
                await call
    finally:
        again._critic.stop()


async def test_half_a_step_is_of_no_timeline_until_a_checkpoint_is_restored(critic: Any) -> None:
    await train(critic, 1, 0)
    await checkpoint(critic, "Take", last_step=1)
    await checkpoint(critic, "Write")
    ask = critic._critic._ask

    async def failing(*arguments: Any, **options: Any) -> Any:
        await ask(*arguments, **options)
        raise RuntimeError("out of memory after an epoch")

    critic._critic._ask = failing
    with pytest.raises(ServiceError, match="internal error"):
        await train(critic, 2, 1)
    critic._critic._ask = ask
    for call in (values(critic, 1), train(critic, 2, 1), checkpoint(critic, "Take", last_step=2)):
        with pytest.raises(OffTimeline, match="of no timeline, having just started or failed half-way"):
            await call
    assert await checkpoint(critic, "Restore") == 1
    assert "loss" in await train(critic, 2, 1)


async def test_a_checkpoint_that_waits_for_a_step_that_fails_half_way_is_not_taken(critic: Any) -> None:
    ask, gate, began = critic._critic._ask, asyncio.Event(), asyncio.Event()

    async def failing(*arguments: Any, **options: Any) -> Any:
        began.set()
        await gate.wait()
        critic._critic._ask = ask
        raise RuntimeError("out of memory after an epoch")

    critic._critic._ask = failing
    training = asyncio.create_task(train(critic, 1, 0))
    await began.wait()
    taking = asyncio.create_task(checkpoint(critic, "Take", last_step=1))
    await settled()
    gate.set()
    with pytest.raises(ServiceError, match="internal error"):
        await training
    with pytest.raises(OffTimeline, match="of no timeline, having just started or failed half-way"):
        await taking
    with pytest.raises(FailedPrecondition, match="no checkpoint was taken"):
        await checkpoint(critic, "Write")
