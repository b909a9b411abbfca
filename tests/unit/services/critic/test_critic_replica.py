"""The critic's deployment without Serve: one rank, in a thread of this process."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import common_pb2
from protos import critic_pb2 as pb
from quartet.config.base import ConfigError
from quartet.config.learner import OptimizerConfig
from quartet.ranks.group import RanksLost
from quartet.wire.errors import FailedPrecondition, InvalidArgument, LeaseLost, ServiceError, Unavailable
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.learner_batches import value_rows
from tests.unit.contexts import Context
from tests.unit.critic_calls import (
    NEWER,
    OLDER,
    OURS,
    Restoration,
    adopt,
    batch,
    checkpoint,
    claim,
    save,
    stage,
    train,
    train_staged,
    values,
)
from tests.unit.fake_ranks import part
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS, arrays
from tests.unit.waiting import until

pytestmark = pytest.mark.processes


async def test_it_serves_the_trainers_values_and_trains(critic: Any, reward_folder: Path) -> None:
    trainer = CriticTrainer(CriticConfig(model=str(reward_folder), optimizer=OptimizerConfig(learning_rate=1e-3)))
    before = await values(critic)
    assert before.tolist() == np.concatenate(value_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))).tolist()
    assert {"loss", "grad_norm"} <= (await train(critic, 1)).keys()
    assert np.abs(await values(critic) - before).max() > 1e-4
    await critic.check_health()


async def test_no_pairs_have_no_values(critic: Any) -> None:
    assert (await critic._critic.values([])) == []


async def test_its_own_errors_reach_the_caller_and_others_do_not(critic: Any, root: Path) -> None:
    (root / "mine").mkdir()
    (root / "mine" / "config.json").write_text("another's model")
    with pytest.raises(InvalidArgument, match=r"^name: mine exists and Quartet did not write it"):
        await save(critic, "mine")
    assert (root / "mine" / "config.json").read_text() == "another's model"
    (root / "mine" / ".quartet").write_text("policy")
    with pytest.raises(
        InvalidArgument, match=rf"^name: mine holds another model \(policy, and this is critic of {OURS.run_id}\)"
    ):
        await save(critic, "mine")
    assert (root / "mine" / "config.json").read_text() == "another's model"

    trainer: Any = part(critic._critic._ranks._ranks[0], CriticTrainer)
    trainer.train = None  # a rank that fails, and names a secret
    context = Context()
    request = pb.TrainRequest(step=1, batch=batch().pack(), epochs=1, minibatch_size=1, lease=OURS)
    with pytest.raises(ServiceError) as caught:
        await critic.Train(request, context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert str(caught.value) == context.details == "Train: internal error (RuntimeError); see the log"


async def test_a_batch_that_comes_in_parts_trains_as_one_that_comes_whole(critic: Any, root: Path) -> None:
    await checkpoint(critic, "Take")
    await checkpoint(critic, "Write")
    whole, after = await train(critic, 1, 0), await values(critic)
    await checkpoint(critic, "Restore")
    await stage(critic, 1)
    staged = await train_staged(critic, 1)
    assert staged == whole
    assert (await values(critic)).tolist() == after.tolist()
    # The repetition after a lost answer, whole or staged, is told the same and trains nothing.
    assert await train_staged(critic, 1) == await train(critic, 1, 0) == whole
    assert (await values(critic)).tolist() == after.tolist()


async def test_parts_are_the_runs_that_holds_the_critic_and_of_its_step(critic: Any) -> None:
    with pytest.raises(LeaseLost, match=r"run older \(lease 3\) no longer"):
        await stage(critic, 1, OLDER)
    await stage(critic, 1)
    for lease, step, error in ((OLDER, 1, LeaseLost), (OURS, 2, FailedPrecondition)):
        with pytest.raises(error):
            await train_staged(critic, step, lease)
    await claim(critic, NEWER, take_over=True)
    with pytest.raises(FailedPrecondition, match=f"staged: {len(PROMPTS)} trajectories, but 0 of step 1 have come"):
        await train_staged(critic, 1, NEWER)
    assert critic._critic.last_step == 0


async def test_a_staged_batch_is_checked_as_one_in_a_message_is(critic: Any) -> None:
    whole = batch()
    marked = bytearray(whole.with_sampled(trained=np.ones(TOKENS, np.bool_)).pack())
    marked[-1] = 2  # `trained` is the last column
    for fields, told in {
        "step": (pb.StageRequest(row=0), "step: 0; must be at least 1"),
        "row": (pb.StageRequest(step=1, row=-1), "row: -1; must be at least 0"),
        "none": (pb.StageRequest(step=1), "batch: empty"),
        "values": (pb.StageRequest(step=1, batch=whole.without("values").pack()), r"batch\.values: missing"),
        "a number": (
            pb.StageRequest(step=1, batch=whole.with_sampled(values=np.full(TOKENS, np.nan, np.float32)).pack()),
            r"batch\.values\[0\] is nan; must be finite",
        ),
        "another": (
            pb.StageRequest(step=1, batch=whole.with_rows(score=np.ones(len(whole), np.float32)).pack()),
            r"batch\.score: not expected",
        ),
        "a mark": (pb.StageRequest(step=1, batch=bytes(marked)), r"batch\.trained: byte .* is 2; must be 0 or 1"),
    }.values():
        fields.lease.CopyFrom(OURS)
        with pytest.raises(InvalidArgument, match=told):
            await critic.Stage(fields, Context())
    both = pb.TrainRequest(step=1, staged=1, batch=whole.pack(), epochs=1, minibatch_size=1, lease=OURS)
    with pytest.raises(InvalidArgument, match="batch: stage it too"):
        await critic.Train(both, Context())


async def test_from_a_checkpoint_it_trains_on_as_if_nothing_had_happened(critic: Any, root: Path) -> None:
    await train(critic, 1)
    assert await checkpoint(critic, "Take", "critic", last_step=1) == 1
    straight = await train(critic, 2)
    assert await checkpoint(critic, "Write", "critic") == 2
    # A caller that repeats the call after a lost answer is told the same.
    assert await checkpoint(critic, "Write", "critic") == 2
    after = await values(critic)
    assert await checkpoint(critic, "Restore", "critic") == 1
    assert np.abs(await values(critic, min_step=1) - after).max() > 1e-4
    assert await train(critic, 2, last_step=1) == straight
    assert (await values(critic, min_step=2)).tolist() == after.tolist()
    await critic.check_health()


async def test_a_critic_in_another_state_than_expected_says_so(critic: Any, root: Path) -> None:
    for call in (train(critic, 8, 7), checkpoint(critic, "Take", "critic", 7), adopt(critic, 7)):
        with pytest.raises(FailedPrecondition, match="last_step: 7 expected, but this critic has trained 0"):
            await call
    with pytest.raises(FailedPrecondition, match="min_step: 7 asked, but this critic has trained 0 so far"):
        await values(critic, 7)
    with pytest.raises(FailedPrecondition, match="no checkpoint was taken for it"):
        await checkpoint(critic, "Write", "critic")
    await train(critic, 1, last_step=0)
    # The repetition of a step that was trained expects what the step expected.
    await train(critic, 1, last_step=0)


async def test_a_wrong_checkpoint_costs_nothing(critic: Any, root: Path) -> None:
    await train(critic, 1)
    before = await values(critic)
    with pytest.raises(InvalidArgument, match=r"^name: nothing does not hold a checkpoint: .*No such file"):
        await checkpoint(critic, "Restore", "nothing")
    await checkpoint(critic, "Take", "critic", last_step=1)
    await checkpoint(critic, "Write", "critic")
    layout = root / "critic" / "layout.json"
    layout.write_text(layout.read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(InvalidArgument, match="ranks: 2 in the checkpoint, 1 here"):
        await checkpoint(critic, "Restore", "critic")
    assert (await values(critic, min_step=1)).tolist() == before.tolist()


async def test_calls_during_a_restoration_are_to_be_repeated(critic: Any, root: Path) -> None:
    await checkpoint(critic, "Take", "critic")
    await checkpoint(critic, "Write", "critic")
    restoration = Restoration(critic)
    restoring = asyncio.create_task(checkpoint(critic, "Restore", "critic"))
    await until(restoration.begun.is_set)
    with pytest.raises(Unavailable, match="a checkpoint is being restored"):
        await values(critic)
    await critic.check_health()
    restoration.gate.set()
    await restoring
    await values(critic)


async def test_a_caller_that_goes_away_does_not_stop_a_restoration(critic: Any, root: Path) -> None:
    await train(critic, 1)
    await checkpoint(critic, "Take", "critic", last_step=1)
    await checkpoint(critic, "Write", "critic")
    await train(critic, 2)
    restoration = Restoration(critic)
    restoring = asyncio.create_task(checkpoint(critic, "Restore", "critic"))
    await until(restoration.begun.is_set)
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    restoration.gate.set()
    async with asyncio.timeout(30):
        while critic._critic.last_step == 2 or critic._critic._restoring.locked():
            await asyncio.sleep(0.01)
    await values(critic, min_step=1)
    await critic.check_health()


async def test_ranks_that_are_gone_for_good_are_worth_a_repetition_and_are_unhealthy(critic: Any) -> None:
    critic._critic.stop()
    with pytest.raises(RanksLost, match="critic: stopped"):
        await critic.check_health()
    for call in (values(critic), claim(critic, NEWER)):
        with pytest.raises(Unavailable, match="critic: stopped; its replica will be replaced"):
            await call


def test_what_ray_reserves_for_ranks_is_refused_where_there_are_none(reward_folder: Path) -> None:
    given = {"model": str(reward_folder), "optimizer": {"learning_rate": 0.1}, "num_gpus": 1}
    with pytest.raises(ConfigError, match=r"num_gpus: for several ranks, .*; with ranks: 1 set ray_actor"):
        CriticConfig.parse(given, "critic.args")
    assert CriticConfig.parse(given | {"ranks": 2}, "critic.args").num_gpus == 1


async def test_late_calls_of_an_older_run_change_nothing_and_are_told_why(critic: Any, root: Path) -> None:
    """Both are at the same step count: the number alone would let the older one through."""
    await train(critic, 1)
    await checkpoint(critic, "Take", "ours", last_step=1)
    await checkpoint(critic, "Write", "ours")
    before = await values(critic)
    late = {
        "values": values(critic, 1, OLDER),
        "train": train(critic, 2, 1, lease=OLDER),
        "repeated": train(critic, 1, 0, lease=OLDER),
        "save": save(critic, "saved", OLDER),
        "take": checkpoint(critic, "Take", "theirs", 1, OLDER),
        "write": checkpoint(critic, "Write", "ours", 0, OLDER),
        "restore": checkpoint(critic, "Restore", "ours", 0, OLDER),
    }
    for name, call in late.items():
        with pytest.raises(LeaseLost, match=r"run older \(lease 3\) no longer .* run ours \(lease 4\) does"):
            await call
        assert critic._critic.last_step == 1, name
    with pytest.raises(InvalidArgument, match="lease: required"):
        await train(critic, 2, lease=common_pb2.Lease())
    assert (await values(critic, 1)).tolist() == before.tolist()
    assert sorted(path.name for path in root.iterdir()) == [".lease-critic.json", "ours"]
