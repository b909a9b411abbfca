"""Helpers that start a critic in this process and call it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from ray import serve

from protos import common_pb2
from protos import critic_pb2 as pb
from quartet.columns import Columns
from quartet.config.learner import OptimizerConfig
from quartet.ranks.group import RankGroup
from quartet.ranks.thread_rank import ThreadRank
from quartet.wire.codec import unpack_floats, unpack_metrics
from services.critic.config import CriticConfig
from services.critic.replica import Critic
from tests import trajectories
from tests.unit.contexts import Context
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS


async def start(model: Path, root: Path) -> Any:
    made = object.__new__(Critic.func_or_class)  # type: ignore[attr-defined]
    config = CriticConfig(model=str(model), optimizer=OptimizerConfig(learning_rate=1e-3), root=str(root))
    with mock.patch.object(serve, "get_replica_context", return_value=SimpleNamespace(app_name="critic")):
        await made.__init__(config, lambda _: RankGroup("critic", [ThreadRank(60)]))
    return made


OURS = common_pb2.Lease(run_id="ours", number=4)


OLDER, NEWER = common_pb2.Lease(run_id="older", number=3), common_pb2.Lease(run_id="newer", number=5)


async def adopt(critic: Any, last_step: int = 0, lease: common_pb2.Lease = OURS) -> None:
    await critic.Adopt(pb.AdoptRequest(lease=lease, last_step=last_step), Context())


async def values(critic: Any, min_step: int | None = None, lease: common_pb2.Lease = OURS) -> np.ndarray:
    reply = await critic.Values(pb.ValuesRequest(trajectories=PAIRS, min_step=min_step, lease=lease), Context())
    return unpack_floats(reply.values, "values")


async def claim(critic: Any, lease: common_pb2.Lease, **claim: Any) -> common_pb2.Held:
    asked = pb.ClaimRequest(lease=lease, claim=common_pb2.Claim(**{"ttl_s": 60} | claim))
    reply: pb.ClaimResponse = await critic.Claim(asked, Context())
    return reply.held


PAIRS = trajectories.of(PROMPTS, RESPONSES).pack()


def batch() -> Columns:
    """Values and returns of 1."""
    ones = np.ones(TOKENS, np.float32)
    return trajectories.of(PROMPTS, RESPONSES, values=ones, returns=ones)


async def train(
    critic: Any, step: int, last_step: int | None = None, *, lease: common_pb2.Lease = OURS
) -> dict[str, float]:
    return await _trained(critic, step, lease, batch=batch().pack(), last_step=last_step)


async def stage(critic: Any, step: int, lease: common_pb2.Lease = OURS) -> None:
    """The batch of `train` in two parts, the second one first."""
    for rows in (range(1, len(PROMPTS)), range(1)):
        part = batch().take(rows).pack()
        await critic.Stage(pb.StageRequest(step=step, row=rows.start, batch=part, lease=lease), Context())


async def train_staged(critic: Any, step: int, lease: common_pb2.Lease = OURS) -> dict[str, float]:
    return await _trained(critic, step, lease, staged=len(PROMPTS))


async def _trained(critic: Any, step: int, lease: common_pb2.Lease, **asked: Any) -> dict[str, float]:
    request = pb.TrainRequest(step=step, epochs=1, minibatch_size=2, seed=step, lease=lease, **asked)
    return unpack_metrics((await critic.Train(request, Context())).metrics)


async def save(critic: Any, name: str, lease: common_pb2.Lease = OURS) -> str:
    return str((await critic.Save(pb.SaveRequest(name=name, lease=lease), Context())).name)


async def checkpoint(
    critic: Any, which: str, name: str = "critic", last_step: int = 0, lease: common_pb2.Lease = OURS
) -> int:
    request = pb.CheckpointRequest(name=name, last_step=last_step, lease=lease)
    return int((await getattr(critic, f"{which}Checkpoint")(request, Context())).last_step)


class Restoration:
    """The start of new ranks, with which a restoration begins; it waits for `gate`."""

    def __init__(self, critic: Any) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        start_ranks = critic._critic._start_ranks

        def gated(config: CriticConfig) -> RankGroup:
            ranks: RankGroup = start_ranks(config)
            start = ranks.start

            async def waits(*arguments: Any, **options: Any) -> None:
                self.begun.set()
                await self.gate.wait()
                await start(*arguments, **options)

            ranks.start = waits  # type: ignore[method-assign, assignment]
            return ranks

        critic._critic._start_ranks = gated
