"""The critic's deployment without Serve: one rank, in a thread of this process."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import critic_pb2 as pb
from services.common.arrays import pack_floats, pack_pairs, unpack_floats, unpack_metrics
from services.common.config import ConfigError
from services.common.errors import InvalidArgument, ServiceError
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
    made._ranks.stop()


PAIRS = pack_pairs(arrays(PROMPTS), arrays(RESPONSES))


async def values(critic: Any) -> np.ndarray:
    reply = await critic.Values(pb.ValuesRequest(pairs=PAIRS), Context())
    return unpack_floats(reply.values, "values")


async def train(critic: Any, step: int) -> dict[str, float]:
    ones = pack_floats(np.ones(TOKENS, np.float32))
    request = pb.TrainRequest(step=step, pairs=PAIRS, values=ones, returns=ones, epochs=1, minibatch_size=2, seed=0)
    return unpack_metrics((await critic.Train(request, Context())).metrics)


async def test_it_serves_the_trainers_values_and_trains(critic: Any, reward_folder: Path) -> None:
    trainer = CriticTrainer(CriticConfig(model=str(reward_folder), optimizer=OptimizerConfig(learning_rate=1e-3)))
    before = await values(critic)
    assert before.tolist() == np.concatenate(trainer.values(arrays(PROMPTS), arrays(RESPONSES))).tolist()
    assert {"loss", "grad_norm"} <= (await train(critic, 1)).keys()
    assert np.abs(await values(critic) - before).max() > 1e-4
    await critic.check_health()


async def test_no_pairs_have_no_values(critic: Any) -> None:
    assert (await critic._run("values", [], [])) == []


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
    critic._ranks.stop()
    with pytest.raises(RanksLost, match="critic: stopped"):
        await critic.check_health()


def test_what_ray_reserves_for_ranks_is_refused_where_there_are_none(reward_folder: Path) -> None:
    given = {"model": str(reward_folder), "optimizer": {"learning_rate": 0.1}, "num_gpus": 1}
    with pytest.raises(ConfigError, match=r"num_gpus: for ranks beside the replica; with ranks: 1 set ray_actor"):
        CriticConfig.parse(given, "critic.args")
    assert CriticConfig.parse(given | {"ranks": 2}, "critic.args").num_gpus == 1
