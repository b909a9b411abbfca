"""One call of each method of the services."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from protos.reference_pb2_grpc import ReferenceServicer, add_ReferenceServicer_to_server
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from protos.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from quartet.wire.codec import pack_floats, pack_longs, pack_metrics
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient
from tests import trajectories
from tests.unit.wire import Script, served

PROMPTS = [np.asarray([5], np.int32), np.asarray([6, 7], np.int32)]


RESPONSES = [np.asarray([8, 9], np.int32), np.asarray([10], np.int32)]


PAIRS = trajectories.of(PROMPTS, RESPONSES)


ROWS = [np.asarray([1.0, 2.0], np.float32), np.asarray([3.0], np.float32)]


THREE = pack_floats(ROWS)


SERVICERS: dict[str, tuple[Any, Any]] = {
    "rollout": (RolloutServicer, add_RolloutServicer_to_server),
    "reward": (RewardServicer, add_RewardServicer_to_server),
    "reference": (ReferenceServicer, add_ReferenceServicer_to_server),
    "critic": (CriticServicer, add_CriticServicer_to_server),
}


@dataclass(frozen=True)
class Call:
    """One RPC of one service: what it answers, and how its client asks for it."""

    name: str
    reply: Any
    ask: Callable[[grpc.aio.Channel, float], Awaitable[Any]]

    def serve(self, script: Script) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        service, method = self.name.split(".")
        kind, add = SERVICERS[service]
        servicer = kind()
        setattr(servicer, method, script.answer)
        return served(add, servicer)


def train(channel: grpc.aio.Channel, timeout_s: float) -> Awaitable[Any]:
    return CriticClient(channel).train(
        3,
        trajectories.of(PROMPTS, RESPONSES, values=ROWS, returns=ROWS),
        epochs=2,
        minibatch_size=4,
        seed=5,
        timeout_s=timeout_s,
    )


CALLS = [
    Call("rollout.Info", rollout_pb2.RolloutInfo(replica="r"), lambda c, t: RolloutClient(c).info(t)),
    Call(
        "reward.Score",
        reward_pb2.ScoreResponse(scores=pack_floats(np.asarray([0.5, -1])), scorer={"name": "n", "model_hash": "h"}),
        lambda c, t: RewardClient(c).score(PAIRS, labels=["a", "b"], timeout_s=t),
    ),
    Call(
        "reward.Info",
        reward_pb2.RewardInfo(scorers=[reward_pb2.ScorerInfo(identity={"name": "n"})]),
        lambda c, t: RewardClient(c).info(t),
    ),
    Call(
        "reference.Logprobs",
        reference_pb2.LogprobsResponse(ref_logprobs=THREE),
        lambda c, t: ReferenceClient(c).logprobs(PAIRS, temperature=0.5, timeout_s=t),
    ),
    Call("reference.Info", reference_pb2.ReferenceInfo(), lambda c, t: ReferenceClient(c).info(t)),
    Call(
        "critic.Values",
        critic_pb2.ValuesResponse(values=THREE, steps=pack_longs([7, 8])),
        lambda c, t: CriticClient(c).values(PAIRS, timeout_s=t),
    ),
    Call("critic.Train", critic_pb2.TrainResponse(metrics=pack_metrics({"loss": 0.5})), train),
    Call(
        "critic.Claim",
        critic_pb2.ClaimResponse(),
        lambda c, t: CriticClient(c).claim(common_pb2.Lease(run_id="a", number=1), 30, t),
    ),
    Call("critic.Save", critic_pb2.SaveResponse(name="x"), lambda c, t: CriticClient(c).save("x", t)),
    Call("critic.Info", critic_pb2.CriticInfo(last_step=4), lambda c, t: CriticClient(c).info(t)),
]


BY_NAME = {call.name: call for call in CALLS}


async def ask(name: str, timeout_s: float = 5) -> tuple[Any, Any]:
    """The request that arrived, and what the client made of the reply."""
    call = BY_NAME[name]
    script = Script(call.reply)
    async with call.serve(script) as channel:
        result = await call.ask(channel, timeout_s)
    assert script.applications == [name.split(".")[0]]
    return script.requests[0], result
