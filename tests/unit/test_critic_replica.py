"""The critic's deployment without Serve: one rank, in a thread of this process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import critic_pb2 as pb
from services.common.arrays import pack_floats, pack_pairs, unpack_floats, unpack_metrics
from services.common.config import ConfigError
from services.common.errors import FailedPrecondition, InvalidArgument, ServiceError, Unavailable
from services.common.learner_config import OptimizerConfig
from services.common.rank_group import RanksLost
from services.critic.config import CriticConfig
from services.critic.replica import Critic
from services.critic.trainer import CriticTrainer
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS, arrays


class Context:
    """What of a gRPC context a servicer touches."""

    code: grpc.StatusCode | None = None
    details = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


@pytest.fixture
async def critic(reward_folder: Path) -> AsyncIterator[Any]:
    made = object.__new__(Critic.func_or_class)  # type: ignore[attr-defined]
    await made.__init__(CriticConfig(model=str(reward_folder), optimizer=OptimizerConfig(learning_rate=1e-3)))
    yield made
    made._critic.stop()


PAIRS = pack_pairs(arrays(PROMPTS), arrays(RESPONSES))


async def values(critic: Any, last_step: int | None = None) -> np.ndarray:
    reply = await critic.Values(pb.ValuesRequest(pairs=PAIRS, last_step=last_step), Context())
    return unpack_floats(reply.values, "values")


async def train(critic: Any, step: int, last_step: int | None = None) -> dict[str, float]:
    ones = pack_floats(np.ones(TOKENS, np.float32))
    schedule = {"epochs": 1, "minibatch_size": 2, "seed": step}
    request = pb.TrainRequest(step=step, pairs=PAIRS, values=ones, returns=ones, last_step=last_step, **schedule)
    return unpack_metrics((await critic.Train(request, Context())).metrics)


async def test_it_serves_the_trainers_values_and_trains(critic: Any, reward_folder: Path) -> None:
    trainer = CriticTrainer(CriticConfig(model=str(reward_folder), optimizer=OptimizerConfig(learning_rate=1e-3)))
    before = await values(critic)
    assert before.tolist() == np.concatenate(trainer.values(arrays(PROMPTS), arrays(RESPONSES))).tolist()
    assert {"loss", "grad_norm"} <= (await train(critic, 1)).keys()
    assert np.abs(await values(critic) - before).max() > 1e-4
    await critic.check_health()


async def test_no_pairs_have_no_values(critic: Any) -> None:
    assert (await critic._critic.values([], [], None)) == []


async def test_its_own_errors_reach_the_caller_and_others_do_not(critic: Any, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()
    with pytest.raises(InvalidArgument, match="exists and is no model"):
        await critic.Save(pb.SaveRequest(path=str(tmp_path)), Context())

    critic._batch = lambda **fields: "no batch, but a secret"
    context = Context()
    ones = pack_floats(np.ones(TOKENS, np.float32))
    request = pb.TrainRequest(step=1, pairs=PAIRS, values=ones, returns=ones, epochs=1, minibatch_size=1, seed=0)
    with pytest.raises(ServiceError) as caught:
        await critic.Train(request, context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert str(caught.value) == context.details == "Train: internal error (RuntimeError); see the log"


async def test_it_is_unhealthy_once_its_ranks_are_gone(critic: Any) -> None:
    critic._critic.stop()
    with pytest.raises(RanksLost, match="critic: stopped"):
        await critic.check_health()


async def checkpoint(critic: Any, which: str, path: Path | str, last_step: int = 0) -> int:
    request = pb.CheckpointRequest(path=str(path), last_step=last_step)
    return int((await getattr(critic, f"{which}Checkpoint")(request, Context())).last_step)


async def test_from_a_checkpoint_it_trains_on_as_if_nothing_had_happened(critic: Any, tmp_path: Path) -> None:
    await train(critic, 1)
    assert await checkpoint(critic, "Take", tmp_path / "critic", last_step=1) == 1
    straight = await train(critic, 2)
    assert await checkpoint(critic, "Write", tmp_path / "critic") == 2
    # Whoever repeats the call after a lost answer is told the same.
    assert await checkpoint(critic, "Write", tmp_path / "critic") == 2
    after = await values(critic)
    assert await checkpoint(critic, "Restore", tmp_path / "critic") == 1
    assert np.abs(await values(critic, last_step=1) - after).max() > 1e-4
    assert await train(critic, 2, last_step=1) == straight
    assert (await values(critic, last_step=2)).tolist() == after.tolist()
    await critic.check_health()


async def test_a_critic_in_another_state_than_expected_says_so(critic: Any, tmp_path: Path) -> None:
    replaced = "last_step: 7 expected, but this critic has trained 0: it was replaced"
    for call in (values(critic, 7), train(critic, 8, 7), checkpoint(critic, "Take", tmp_path / "critic", 7)):
        with pytest.raises(FailedPrecondition, match=replaced):
            await call
    with pytest.raises(FailedPrecondition, match="nothing was taken"):
        await checkpoint(critic, "Write", tmp_path / "critic")
    await train(critic, 1, last_step=0)
    # The repetition of a step that was trained expects what the step expected.
    await train(critic, 1, last_step=0)


async def test_a_wrong_checkpoint_costs_nothing(critic: Any, tmp_path: Path) -> None:
    await train(critic, 1)
    before = await values(critic)
    with pytest.raises(InvalidArgument, match="holds no checkpoint"):
        await checkpoint(critic, "Restore", tmp_path)
    with pytest.raises(InvalidArgument, match="'critic'; must be absolute"):
        await checkpoint(critic, "Restore", "critic")
    await checkpoint(critic, "Take", tmp_path / "critic", last_step=1)
    await checkpoint(critic, "Write", tmp_path / "critic")
    layout = tmp_path / "critic" / "layout.json"
    layout.write_text(layout.read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(InvalidArgument, match="ranks: 2 in the checkpoint, 1 here"):
        await checkpoint(critic, "Restore", tmp_path / "critic")
    assert (await values(critic, last_step=1)).tolist() == before.tolist()


async def test_calls_during_a_restoration_are_to_be_repeated(critic: Any, tmp_path: Path) -> None:
    await checkpoint(critic, "Take", tmp_path / "critic")
    await checkpoint(critic, "Write", tmp_path / "critic")
    restoring = asyncio.create_task(checkpoint(critic, "Restore", tmp_path / "critic"))
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="a checkpoint is being restored"):
        await values(critic)
    await critic.check_health()
    await restoring
    await values(critic)


async def test_a_caller_that_goes_away_does_not_stop_a_restoration(critic: Any, tmp_path: Path) -> None:
    await train(critic, 1)
    await checkpoint(critic, "Take", tmp_path / "critic", last_step=1)
    await checkpoint(critic, "Write", tmp_path / "critic")
    await train(critic, 2)
    restoring = asyncio.create_task(checkpoint(critic, "Restore", tmp_path / "critic"))
    await asyncio.sleep(0.01)
    restoring.cancel()
    async with asyncio.timeout(30):
        while critic._critic.last_step == 2 or critic._critic._restoring.locked():
            await asyncio.sleep(0.01)
    await values(critic, last_step=1)
    await critic.check_health()


async def test_ranks_that_are_gone_are_worth_a_repetition(critic: Any) -> None:
    critic._critic.stop()
    with pytest.raises(Unavailable, match="critic: stopped; its replica will be replaced"):
        await values(critic)


def test_what_ray_reserves_for_ranks_is_refused_where_there_are_none(reward_folder: Path) -> None:
    given = {"model": str(reward_folder), "optimizer": {"learning_rate": 0.1}, "num_gpus": 1}
    with pytest.raises(ConfigError, match=r"num_gpus: for ranks beside the replica; with ranks: 1 set ray_actor"):
        CriticConfig.parse(given, "critic.args")
    assert CriticConfig.parse(given | {"ranks": 2}, "critic.args").num_gpus == 1
