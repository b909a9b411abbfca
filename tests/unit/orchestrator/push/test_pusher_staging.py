"""Staging first and delivering after: with a real learner in a rank's thread, and receivers that really receive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.learners import Update
from orchestrator.policy.ranks import Policy
from orchestrator.policy.trainer import PolicyTrainer
from orchestrator.push.prover import Prover
from orchestrator.push.pusher import WeightPusher
from orchestrator.push.tolerance import Tolerance
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup
from quartet.ranks.thread_rank import ThreadRank
from services.rollout.member import WeightMember
from tests.learner_batches import PolicyBatch
from tests.members import LEASE, StagingEngine
from tests.unit.fake_fleet import FakeSource, Fleet, make_pusher
from tests.unit.fake_ranks import part
from tests.unit.fakes import make_config
from tests.unit.naive import PROMPTS, RESPONSES, arrays
from tests.unit.waiting import settled, until

Weights = dict[str, torch.Tensor]
ROWS = [np.full(len(row), -1.0, np.float32) for row in RESPONSES]
BATCH = PolicyBatch(arrays(PROMPTS), arrays(RESPONSES), ROWS, ROWS, ROWS, [-row for row in ROWS], 0.0)


class OneReplica:
    """A rollout client of one replica in this process."""

    def __init__(self, backend: str) -> None:
        self.engine = StagingEngine(backend, torch.device("cpu"), "replica")
        self.member = WeightMember(self.engine, "a")  # type: ignore[arg-type]

    async def update_weights(self, timeout_s: float, members: Any = (), **phase: Any) -> list[pb.WeightReport]:
        return [await self.member.carry_out(pb.WeightPhase(timeout_s=timeout_s, lease=LEASE, **phase))]


@asynccontextmanager
async def learner(
    folder: Path, backend: str
) -> AsyncIterator[tuple[Policy, PolicyTrainer, WeightPusher, OneReplica]]:
    config = make_config(
        folder,
        policy={"model": str(folder), "optimizer": {"learning_rate": 0.1}},
        weights={"stall_s": 10, "timeout_s": 20, "attempts": 1},
    )
    rank = ThreadRank(60)
    ranks = RankGroup("policy", [rank])
    await ranks.start(PolicyTrainer, config.scheduled_policy, config.algorithm, Distribution(1.0), timeout_s=60)
    policy, replica = Policy(ranks, config), OneReplica(backend)
    await replica.update_weights(5, claim=common_pb2.Claim(ttl_s=60))
    yield policy, part(rank, PolicyTrainer), WeightPusher(replica, policy, backend, config.weights), replica  # type: ignore[arg-type]
    await policy.close()


def update_of(seed: int) -> Update:
    return Update(step=1, seed=seed, columns=BATCH.columns, kl_coef=BATCH.kl_coef)


def copied(trainer: PolicyTrainer) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in trainer.learner.full_weights()}


def same(actual: Weights, wanted: Weights) -> bool:
    return actual.keys() == wanted.keys() and all(torch.equal(actual[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
async def test_training_right_after_staging_changes_nothing_that_is_delivered(
    policy_folder: Path, backend: str
) -> None:
    async with learner(policy_folder, backend) as (policy, trainer, pusher, replica):
        first = copied(trainer)
        staged = await pusher.stage(1)
        await policy.train(update_of(0))  # begun, and ended, before the first byte is delivered
        second = copied(trainer)
        assert not same(first, second)
        report = await pusher.deliver(staged)
        assert (report.policy_version, report.replicas, replica.engine.version) == (1, ("a",), 1)
        assert same(replica.engine._model, first)
        # Once more, the delivery now beside the training.
        staged = await pusher.stage(2)
        await asyncio.gather(policy.train(update_of(1)), pusher.deliver(staged))
        assert not same(copied(trainer), second)
        assert (replica.engine.version, same(replica.engine._model, second)) == (2, True)


async def test_a_delivery_does_not_wait_for_the_learners_turn(policy_folder: Path) -> None:
    async with learner(policy_folder, "gloo") as (policy, _, pusher, replica):
        staged = await pusher.stage(1)
        async with policy._ranks._turn:  # as while the learner trains
            async with asyncio.timeout(20):
                await pusher.deliver(staged)
        assert replica.engine.version == 1


async def test_weights_that_were_staged_over_cannot_be_delivered() -> None:
    source = FakeSource()
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    old, new = await pusher.stage(4), await pusher.stage(5)
    with pytest.raises(ValueError, match="version 4 was staged before another; its copy is gone"):
        await pusher.deliver(old)
    assert (await pusher.deliver(new)).policy_version == 5
    assert fleet.versions == {"a": 5}


async def test_the_learner_scores_before_it_trains_and_later_members_are_proved_next_time() -> None:
    source = FakeSource()
    fleet = Fleet(source, a=1)
    prover = Prover(source, [np.asarray([1, 2, 3], np.int32)], Tolerance(0.01, 0.01), every=5)
    pusher = make_pusher(fleet, prover=prover)
    scored, score = asyncio.Event(), source.score

    async def late(sequences: Any) -> Any:
        await scored.wait()
        return await score(sequences)

    source.score = late  # type: ignore[method-assign]
    staging = asyncio.create_task(pusher.stage(1))
    await until(lambda: "gather" in source.calls)
    await settled()
    assert not staging.done()
    scored.set()
    await pusher.deliver(await staging)
    await pusher.deliver(await pusher.stage(2))
    assert fleet.engines["a"].calls.count("score") == 2
    staged = await pusher.stage(3)  # with the members of the last proof: none is due
    fleet.add(b=1)
    await pusher.deliver(staged)
    assert fleet.versions == {"a": 3, "b": 3}
    assert fleet.engines["b"].calls.count("score") == 0
    await pusher.deliver(await pusher.stage(4))
    assert [fleet.engines[name].calls.count("score") for name in ("a", "b")] == [3, 1]


async def test_what_the_learner_scored_for_weights_that_were_staged_over_proves_no_others() -> None:
    source = FakeSource()
    fleet = Fleet(source, a=1)
    prover = Prover(source, [np.asarray([1, 2, 3], np.int32)], Tolerance(0.01, 0.01), every=9)
    pusher = make_pusher(fleet, prover=prover)
    for version in (1, 2):
        await pusher.deliver(await pusher.stage(version))
    fleet.add(b=1)
    await pusher.stage(3)  # the learner scores, as b has given no proof
    fleet.remove("b")
    report = await pusher.deliver(await pusher.stage(4))
    assert (report.difference, fleet.engines["a"].calls.count("score")) == (None, 2)
