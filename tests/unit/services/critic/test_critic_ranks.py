"""A critic that loses its ranks: it starts others, and a run restores its training into them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from quartet.config.learner import OptimizerConfig
from quartet.learner.layout import LAYOUT, Layout
from quartet.ranks.group import RankDied, RankGroup, RanksLost
from quartet.wire.errors import OffTimeline, Unavailable
from services.critic.config import CriticConfig
from services.critic.learner import CriticModel
from services.critic.trainer import CriticTrainer
from tests.unit.contexts import Context
from tests.unit.critic_calls import (
    OURS,
    Restoration,
    adopt,
    batch,
    checkpoint,
    claim,
    stage,
    train,
    train_staged,
    values,
)
from tests.unit.fake_ranks import FakeRank
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import until


def lose(critic: Any) -> None:
    """Ends the ranks as their deaths do."""
    critic._critic._ranks._end("critic.train: rank 0 of 1 died: killed")


async def renewed(critic: Any) -> None:
    """Returns when the critic takes a run on again."""
    async with asyncio.timeout(60):
        while True:
            try:
                await claim(critic, OURS)
                return
            except Unavailable:
                await asyncio.sleep(0.01)


async def saved(critic: Any, step: int) -> None:
    await checkpoint(critic, "Take", "critic", last_step=step)
    await checkpoint(critic, "Write", "critic")


async def test_lost_ranks_are_replaced_in_place_and_a_checkpoint_is_restored_into_the_new_ones(critic: Any) -> None:
    untrained = (await values(critic)).tolist()
    await train(critic, 1)
    await saved(critic, 1)
    straight, after = await train(critic, 2), (await values(critic)).tolist()
    started = Restoration(critic)
    lose(critic)
    with pytest.raises(
        Unavailable, match="rank 0 of 1 died: killed; the critic has lost its ranks and starts others"
    ):
        await values(critic, min_step=2)
    await until(started.begun.is_set)
    # Its training is lost, which a run is told at once; and that others start is no reason to replace the replica.
    for call in (values(critic, min_step=2), train(critic, 3, last_step=2), checkpoint(critic, "Take", "other", 2)):
        with pytest.raises(OffTimeline, match="holds step 0 of no timeline"):
            await call
    with pytest.raises(Unavailable, match="starts others"):
        await claim(critic, OURS)
    assert (await critic.Info(common_pb2.InfoRequest(), Context())).last_step == 0
    await critic.check_health()
    # A run restores as soon as it knows.
    started.begun.clear()
    restoring = asyncio.create_task(checkpoint(critic, "Restore", "critic"))
    started.gate.set()
    assert await restoring == 1
    assert not started.begun.is_set()  # the new ranks had done nothing yet, so no others were started
    assert await train(critic, 2, last_step=1) == straight
    assert (await values(critic, min_step=2)).tolist() == after
    assert after != untrained


async def test_a_health_check_notices_too_and_new_ranks_begin_with_the_first_model(critic: Any) -> None:
    untrained = (await values(critic)).tolist()
    await train(critic, 1)
    lose(critic)
    await critic.check_health()
    await renewed(critic)
    assert (await values(critic)).tolist() == untrained
    await adopt(critic)
    await train(critic, 1, last_step=0)


async def test_ranks_that_were_used_are_not_restored_into(critic: Any) -> None:
    await saved(critic, 0)
    lose(critic)
    await critic.check_health()
    await renewed(critic)
    await values(critic)
    started = Restoration(critic)
    started.gate.set()
    await checkpoint(critic, "Restore", "critic")
    assert started.begun.is_set()


async def test_what_was_staged_or_waited_is_not_trained_on_new_ranks(critic: Any) -> None:
    """A step that waited for its turn would train a model that has lost the steps before it."""
    await train(critic, 1)
    await stage(critic, 2)
    await critic._critic.turn.acquire()
    waiting = asyncio.create_task(train(critic, 2, last_step=1))
    async with asyncio.timeout(10):
        while critic._critic.last_step != 2:
            await asyncio.sleep(0.01)
    lose(critic)
    await critic.check_health()
    await renewed(critic)
    critic._critic.turn.release()
    with pytest.raises(Unavailable, match="step: 2 follows on training that is lost"):
        await waiting
    with pytest.raises(Exception, match="0 of step 2 have come"):
        await train_staged(critic, 2)


async def test_a_step_that_was_answered_as_the_ranks_were_lost_is_not_that_of_new_ranks(
    critic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = critic._critic
    ask = model._ask

    async def asked(method: Any, *arguments: Any, **options: Any) -> Any:
        answer = await ask(method, *arguments, **options)
        if method is CriticTrainer.train:
            lose(critic)
            await critic.check_health()
        return answer

    monkeypatch.setattr(model, "_ask", asked)
    with pytest.raises(Unavailable, match="step: 1 follows on training that is lost"):
        await train(critic, 1)
    assert (model.last_step, model.timeline) == (0, 0)


@in_virtual_time
async def test_a_late_failure_of_the_ranks_before_costs_a_restored_critic_nothing(
    reward_folder: Path, root: Path
) -> None:
    """The death of a rank that trained while a checkpoint was restored into another is told after that."""
    config = CriticConfig(model=str(reward_folder), optimizer=OptimizerConfig(learning_rate=1e-3), root=str(root))
    layout = Layout.of(config, parameters=10, step=3)
    (root / "saved").mkdir(parents=True)
    layout.write(root / "saved" / LAYOUT)
    ranks: list[FakeRank] = []

    def start_ranks(_: CriticConfig) -> RankGroup:
        ranks.append(FakeRank(("127.0.0.1", 7), None))
        return RankGroup("critic", ranks[-1:])

    critic = CriticModel(config, "critic", start_ranks)
    critic.fence.claim(OURS, common_pb2.Claim(ttl_s=60))
    await critic.start()
    await critic.adopt(OURS, 0)
    ranks[0].answers, ranks[0].after_s = [RankDied("killed")], 1.2
    training = asyncio.ensure_future(critic.train(OURS, 1, [batch()], 0, epochs=1, minibatch_size=2, seed=1))
    await asyncio.sleep(0.1)
    assert await critic.restore_checkpoint(OURS, "saved") == 3
    with pytest.raises(Unavailable, match="others are in their place"):
        await training
    await asyncio.sleep(2)
    assert (critic.expect(OURS, 3), critic.last_step, critic.timeline) == (3, 3, OURS.number)
    assert [rank.killed for rank in ranks] == [1, 0]


async def test_a_replica_whose_new_ranks_do_not_start_is_replaced(critic: Any) -> None:
    def none(config: CriticConfig) -> RankGroup:
        raise RuntimeError("no more processes")

    critic._critic._start_ranks = none
    lose(critic)
    await critic.check_health()
    await until(lambda: critic._critic._failure)
    with pytest.raises(RanksLost, match="no more processes"):
        await critic.check_health()
    with pytest.raises(Unavailable, match="no more processes; its replica will be replaced"):
        await claim(critic, OURS)
