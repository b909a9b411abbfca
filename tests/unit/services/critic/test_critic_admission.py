"""A critic's limits, and the order of its answers: the deployment without Serve and without a model."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from protos import common_pb2
from protos import critic_pb2 as pb
from quartet.columns import Columns
from quartet.config.limits import LimitsConfig
from quartet.serving.admission import Admission
from quartet.serving.batcher import Batcher
from quartet.serving.token_call import Asked
from quartet.wire.callers import Purpose
from quartet.wire.codec import Floats, unpack_floats, unpack_longs
from quartet.wire.errors import FailedPrecondition, ResourceExhausted, Unavailable
from services.critic.config import CriticConfig
from services.critic.replica import Critic
from tests import trajectories
from tests.unit.contexts import Context
from tests.unit.waiting import settled, until


class Model:
    """Gives the number of steps that were trained as every value, pass by pass, each when it is let."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.last_step = 0
        self.passes: list[int] = []
        self.steps: list[int] = []
        """Steps that are trained, or wait for their turn."""
        self.gate = asyncio.Event()
        self.gate.set()

    def expect(self, lease: common_pb2.Lease, min_step: int | None) -> int:
        if self.last_step < (min_step or 0):
            raise FailedPrecondition(f"min_step: {min_step} asked")
        return self.last_step

    def check(self) -> None:
        pass

    def expect_ranks(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def values(self, asked: Sequence[Asked]) -> list[Floats]:
        self.passes.append(len(asked))
        await self.gate.wait()
        return [np.full(each.trajectories.counts[each.row], self.last_step, np.float32) for each in asked]

    async def train(self, lease: common_pb2.Lease, step: int, *_: Any, **__: Any) -> dict[str, float]:
        self.steps.append(step)
        async with self.turn:
            self.last_step = step
        return {"loss": 0.0}


def make(batch_s: float = 10) -> Any:
    made = object.__new__(Critic.func_or_class)  # type: ignore[attr-defined]
    made._critic = Model()
    made._config = CriticConfig.model_construct(packing=False)
    limits = LimitsConfig(max_call_rows=16)
    made._admission, made._train_admission = Admission(limits), Admission(limits)
    made._batcher = Batcher(made._critic.values, batch_tokens=8, batch_s=batch_s, turn=made._critic.turn)
    made._model = common_pb2.ModelInfo(vocab_size=64, max_length=16)
    return made


def pairs(count: int) -> Columns:
    return trajectories.of([[1]] * count, [[1]] * count)


async def computing(critic: Any, calls: int) -> None:
    """Returns when so many calls for values have come and a pass computes."""
    await until(lambda: len(critic._batcher._open) == calls and critic._critic.passes)


async def values(critic: Any, count: int, min_step: int | None = None) -> list[float]:
    """The values, each the number of steps that were trained; the reply names the same steps."""
    reply = await critic.Values(pb.ValuesRequest(trajectories=pairs(count).pack(), min_step=min_step), Context())
    actual = unpack_floats(reply.values, "values").tolist()
    assert unpack_longs(reply.steps, "steps").tolist() == actual
    return list(actual)


def train(step: int, count: int) -> pb.TrainRequest:
    numbers = np.zeros(count, np.float32)
    return pb.TrainRequest(
        step=step,
        batch=pairs(count).with_sampled(values=numbers, returns=numbers).pack(),
        epochs=1,
        minibatch_size=1,
        seed=0,
    )


async def test_values_are_computed_in_passes_between_which_training_has_its_turn_and_say_by_which_step() -> None:
    """Four rows fit into a pass; the step is trained after the first one."""
    critic = make()
    critic._critic.gate.clear()
    asked = asyncio.create_task(values(critic, 12, min_step=0))
    await computing(critic, 1)
    training = asyncio.create_task(critic.Train(train(1, 2), Context()))
    await until(lambda: critic._critic.steps == [1])
    await settled()
    assert (training.done(), critic._critic.last_step) == (False, 0)
    critic._critic.gate.set()
    await training
    assert await asked == [0.0] * 4 + [1.0] * 8
    assert critic._critic.passes == [4, 4, 4]
    assert await values(critic, 2, min_step=1) == [1.0, 1.0]
    with pytest.raises(FailedPrecondition, match="min_step: 2 asked"):
        await values(critic, 2, min_step=2)


@pytest.mark.parametrize("call", ["Values", "Train"])
async def test_too_much_is_refused_before_it_is_looked_at(call: str) -> None:
    critic = make()
    request = pb.ValuesRequest(trajectories=pairs(17).pack()) if call == "Values" else train(1, 17)
    with pytest.raises(ResourceExhausted, match="17 rows, but a call may hold 16"):
        await getattr(critic, call)(request, Context())
    assert (critic._critic.passes, critic._critic.last_step) == ([], 0)


async def test_a_run_is_served_before_foreign_callers() -> None:
    critic = make()
    critic._critic.gate.clear()
    foreign = [
        asyncio.create_task(
            critic.Values(pb.ValuesRequest(trajectories=pairs(16).pack()), Context("judge", Purpose.FOREIGN))
        )
        for _ in range(3)
    ]
    await computing(critic, 3)
    run = asyncio.create_task(values(critic, 3))
    await computing(critic, 4)
    critic._critic.gate.set()
    await run
    # The pass that was under way, and its own.
    assert critic._critic.passes[:2] == [4, 3]
    await asyncio.gather(*foreign)


async def test_values_that_hang_are_answered_and_unhealthy() -> None:
    critic = make(batch_s=0.1)
    critic._critic.gate.clear()
    with pytest.raises(Unavailable, match="will be replaced"):
        await values(critic, 2)
    with pytest.raises(RuntimeError, match="longer than batch_s"):
        await critic.check_health()
