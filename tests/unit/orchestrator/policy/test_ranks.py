"""Calls of the policy reach the right ranks, and the loop gets their answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.config.run import OrchestratorConfig
from orchestrator.learners import Update
from orchestrator.policy.ranks import Policy
from quartet.ranks.group import RankDied, RankGroup, RanksLost
from quartet.weight_transfer.memory.buckets import checksum
from quartet.wire.errors import DeadlineExceeded
from tests.trajectories import of
from tests.unit.fake_ranks import NEVER, FakeRank

ROWS = [np.ones(2, np.float32)]
BATCH = of([[7]], [[8, 9]], logprobs=ROWS, advantages=ROWS, values=ROWS)
UPDATE = Update(step=3, seed=41, columns=BATCH, kl_coef=0.25)


def make_policy(folder: Path, *ranks: FakeRank, senders: int = 1, **algorithm: Any) -> Policy:
    config = OrchestratorConfig.parse(
        {
            "name": "test",
            "data": {"path": "x"},
            "policy": {"model": str(folder), "optimizer": {"learning_rate": 0.1}, "ranks": len(ranks)},
            "weights": {"senders": senders, "bucket_mib": 2, "stall_s": 0.5, "timeout_s": 0.05},
            "timeouts": {"train_s": 5},
            "algorithm": algorithm,
        },
        "orchestrator",
    )
    return Policy(RankGroup("policy", ranks, store=shared), config)


def shared(value: Any, /) -> Any:
    return "shared", value


SENDING = [f"WeightSending.{name}" for name in ("rendezvous", "manifest", "join", "send", "add_newcomers")]


def methods(rank: FakeRank) -> list[Any]:
    return [call[1] for call in rank.called]


async def test_all_ranks_train_and_rank_0_answers(policy_folder: Path) -> None:
    ranks = [FakeRank("numbers", {"loss": 1.0}), FakeRank()]
    policy = make_policy(policy_folder, *ranks)
    assert await policy.logprobs(BATCH) == "numbers"  # type: ignore[comparison-overlap]
    assert await policy.train(UPDATE) == {"loss": 1.0}
    await policy.gather(4)
    await policy.save(Path("there"))
    for rank in ranks:
        (*asked, (_, bare)), (*trained, (_, batch), kl_coef, seed), *others = rank.called
        assert (asked, trained) == (["run", "PolicyTrainer.logprobs"], ["run", "PolicyTrainer.train"])
        # No rank gets columns that it does not read.
        assert (list(bare.columns), list(batch.columns)) == ([], ["logprobs", "advantages"])
        assert (kl_coef, seed) == (0.25, 41)
        assert others == [("run", "WeightSending.gather", 4), ("run", "RankLearner.save", Path("there"))]


async def test_every_rank_writes_its_part_of_the_policys_folder(policy_folder: Path, tmp_path: Path) -> None:
    ranks = [FakeRank() for _ in range(2)]
    policy = make_policy(policy_folder, *ranks)
    await policy.take_snapshot(tmp_path, 3, copies=False)
    await policy.write_snapshot(tmp_path)
    await policy.restore(tmp_path)
    folder = tmp_path / "policy"
    for rank in ranks:
        assert rank.called == [
            ("run", "RankLearner.take_snapshot", folder, 3, False),
            ("run_beside", "RankLearner.write_snapshot"),
            ("run", "RankLearner.restore", folder),
        ]


@pytest.mark.parametrize(("steps", "calls"), [(2, 1), (3, 0)])
async def test_it_does_nothing_in_the_critics_own_steps(policy_folder: Path, steps: int, calls: int) -> None:
    rank = FakeRank({"loss": 1.0})
    policy = make_policy(policy_folder, rank, critic_only_steps=steps)
    assert await policy.train(UPDATE) == ({"loss": 1.0} if calls else {})
    assert len(rank.called) == calls


async def test_only_the_sending_ranks_meet_the_replicas(policy_folder: Path) -> None:
    digests = {0: b"a", 1: b"b", 2: b"c"}
    ranks = [
        FakeRank(("a", 7), b"m", None, {0: b"a", 2: b"c"}),
        FakeRank(("b", 8), b"m", None, {1: b"b"}),
        FakeRank(),
    ]
    policy = make_policy(policy_folder, *ranks, senders=2)
    assert await policy.rendezvous("gloo") == [("a", 7), ("b", 8)]
    assert await policy.manifest() == b"m"
    await policy.join(1, 4)
    assert await policy.send(4) == checksum(digests)
    await policy.add_newcomers(2, 3)
    assert [methods(rank) for rank in ranks] == [SENDING] * 2 + [[]]
    asked = ("gloo", "127.0.0.1", 2 << 20, 0.5, 2, False)
    assert ranks[0].called[0] == ("run_beside", "WeightSending.rendezvous", *asked)
    assert ranks[0].called[4] == ("run_beside", "WeightSending.add_newcomers", 2, 3)


async def test_a_send_out_of_time_may_be_tried_again(policy_folder: Path) -> None:
    rank = FakeRank({}, {}, after_s=NEVER)
    policy = make_policy(policy_folder, rank)
    with pytest.raises(DeadlineExceeded, match=r"policy.send: no answer"):
        await policy.send(4)
    rank.after_s = 0
    assert await policy.send(4) == ""


async def test_a_dead_rank_is_the_end_of_training(policy_folder: Path) -> None:
    ranks = [FakeRank(after_s=NEVER), FakeRank(RankDied("killed"))]
    policy = make_policy(policy_folder, *ranks)
    with pytest.raises(RanksLost, match=r"policy.train: rank 1 of 2 died: killed"):
        await policy.train(UPDATE)
    with pytest.raises(RanksLost, match="rank 1 of 2 died"):
        await policy.save(Path("there"))
    await policy.close()
    assert min(rank.killed for rank in ranks) > 0
