"""What every client does with deadlines, failures and metadata, over real gRPC; and what each one sends and reads."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from protos.reference_pb2_grpc import ReferenceServicer, add_ReferenceServicer_to_server
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from protos.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from services.common.arrays import pack_floats, pack_metrics, unpack_floats, unpack_pairs
from services.common.client import Backoff
from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient
from tests.unit.wire import Script, served

PROMPTS = [np.asarray([5], np.int32), np.asarray([6, 7], np.int32)]
RESPONSES = [np.asarray([8, 9], np.int32), np.asarray([10], np.int32)]
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
        3, PROMPTS, RESPONSES, ROWS, ROWS, epochs=2, minibatch_size=4, seed=5, timeout_s=timeout_s
    )


CALLS = [
    Call("rollout.Info", rollout_pb2.RolloutInfo(replica="r"), lambda c, t: RolloutClient(c).info(t)),
    Call(
        "reward.Score",
        reward_pb2.ScoreResponse(scores=pack_floats(np.asarray([0.5, -1])), scorer={"name": "n", "model_hash": "h"}),
        lambda c, t: RewardClient(c).score(PROMPTS, RESPONSES, labels=["a", "b"], timeout_s=t),
    ),
    Call("reward.Info", reward_pb2.RewardInfo(), lambda c, t: RewardClient(c).info(t)),
    Call(
        "reference.Logprobs",
        reference_pb2.LogprobsResponse(ref_logprobs=THREE),
        lambda c, t: ReferenceClient(c).logprobs(PROMPTS, RESPONSES, temperature=0.5, timeout_s=t),
    ),
    Call("reference.Info", reference_pb2.ReferenceInfo(), lambda c, t: ReferenceClient(c).info(t)),
    Call(
        "critic.Values",
        critic_pb2.ValuesResponse(values=THREE),
        lambda c, t: CriticClient(c).values(PROMPTS, RESPONSES, timeout_s=t),
    ),
    Call("critic.Train", critic_pb2.TrainResponse(metrics=pack_metrics({"loss": 0.5})), train),
    Call("critic.Save", critic_pb2.SaveResponse(path="/x"), lambda c, t: CriticClient(c).save("x", t)),
    Call("critic.Info", critic_pb2.CriticInfo(last_step=4), lambda c, t: CriticClient(c).info(t)),
]
BY_NAME = {call.name: call for call in CALLS}
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


async def ask(name: str, timeout_s: float = 5) -> tuple[Any, Any]:
    """The request that arrived, and what the client made of the reply."""
    call = BY_NAME[name]
    script = Script(call.reply)
    async with call.serve(script) as channel:
        result = await call.ask(channel, timeout_s)
    assert script.applications == [name.split(".")[0]]
    return script.requests[0], result


@every_call
async def test_unavailable_is_asked_again(call: Call) -> None:
    script = Script(call.reply, failures=[grpc.StatusCode.UNAVAILABLE])
    async with call.serve(script) as channel:
        await call.ask(channel, 5)
    assert script.applications == [call.name.split(".")[0]] * 2
    assert script.requests[0] == script.requests[1]


@every_call
async def test_no_answer_in_time_names_the_call(call: Call) -> None:
    script = Script(hangs=True)
    async with call.serve(script) as channel:
        with pytest.raises(DeadlineExceeded, match=f"^{call.name}: no answer within 0.1 s$"):
            await call.ask(channel, 0.1)


@every_call
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
        (grpc.StatusCode.FAILED_PRECONDITION, FailedPrecondition),
        (grpc.StatusCode.NOT_FOUND, NotFound),
    ],
)
async def test_other_failures_are_raised_at_once(call: Call, code: grpc.StatusCode, kind: type[Exception]) -> None:
    script = Script(call.reply, failures=[code])
    async with call.serve(script) as channel:
        with pytest.raises(kind, match=f"^{call.name}: said the script$"):
            await call.ask(channel, 5)
    assert len(script.requests) == 1


async def test_unavailable_until_the_deadline() -> None:
    # Tries at 0, 0.1 and 0.3 s; the next would be at 0.7 s.
    call, script = BY_NAME["reward.Info"], Script(failures=[grpc.StatusCode.UNAVAILABLE] * 9)
    async with call.serve(script) as channel:
        with pytest.raises(Unavailable, match=r"^reward.Info: said the script$"):
            await call.ask(channel, 0.6)
    assert 2 <= len(script.requests) <= 3


async def test_the_deadline_is_that_of_all_tries_together() -> None:
    # Tries at 0, 0.1, 0.3 and 0.7 s; the fourth hangs. A deadline of 1.5 s for each try would end at 2.2 s.
    call, script = BY_NAME["reward.Info"], Script(failures=[grpc.StatusCode.UNAVAILABLE] * 3, hangs=True)
    async with call.serve(script) as channel:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"^reward.Info: no answer within 1.5 s$"):
            await call.ask(channel, 1.5)
        assert 1.4 < time.monotonic() - start < 2
        async with asyncio.timeout(5):
            await script.cancelled.wait()
    assert len(script.requests) == 4


async def test_cancelling_the_caller_ends_the_call_on_the_server() -> None:
    call, script = BY_NAME["reward.Score"], Script(hangs=True)
    async with call.serve(script) as channel:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await call.ask(channel, 60)
        async with asyncio.timeout(5):
            await script.cancelled.wait()


async def test_the_application_can_have_another_name() -> None:
    call, script = BY_NAME["reward.Info"], Script(reward_pb2.RewardInfo())
    async with call.serve(script) as channel, RewardClient(channel, "reward-b") as client:
        await client.info(5)
    assert script.applications == ["reward-b"]


async def test_messages_of_more_than_four_megabytes() -> None:
    call = BY_NAME["reward.Score"]
    async with call.serve(Script(reward_pb2.ScoreResponse(scores=bytes(5 << 20)))) as channel:
        scores = await call.ask(channel, 30)
    assert len(scores.values) == 5 * 2**20 / 4


async def test_a_pause_that_would_pass_the_deadline_is_not_begun() -> None:
    backoff, error = Backoff(0.05), Unavailable("gone")
    with pytest.raises(Unavailable, match="gone"):
        await backoff.wait(error)
    assert 0 < backoff.left_s <= 0.05
    assert Backoff(-1).left_s == 1e-3


async def test_score() -> None:
    request, scores = await ask("reward.Score")
    assert request.labels == ["a", "b"]
    prompts, responses = unpack_pairs(request.tokens, vocab_size=11, max_length=9)
    assert [prompt.tolist() for prompt in prompts] == [[5], [6, 7]]
    assert [response.tolist() for response in responses] == [[8, 9], [10]]
    assert (scores.values.tolist(), scores.scorer, scores.model_hash) == ([0.5, -1.0], "n", "h")


async def test_score_texts() -> None:
    call, script = BY_NAME["reward.Score"], Script(BY_NAME["reward.Score"].reply)
    async with call.serve(script) as channel:
        await RewardClient(channel).score_texts(["p", "q"], ["r", "s"], timeout_s=5)
    assert script.requests[0] == reward_pb2.ScoreRequest(texts={"prompts": ["p", "q"], "responses": ["r", "s"]})


async def test_logprobs() -> None:
    request, rows = await ask("reference.Logprobs")
    assert request.temperature == 0.5
    assert len(unpack_pairs(request.pairs, vocab_size=11, max_length=9)[0]) == 2
    assert [row.tolist() for row in rows] == [[1, 2], [3]]


async def test_values() -> None:
    request, rows = await ask("critic.Values")
    assert len(unpack_pairs(request.pairs, vocab_size=11, max_length=9)[0]) == 2
    assert [row.tolist() for row in rows] == [[1, 2], [3]]


@pytest.mark.parametrize("name", ["reference.Logprobs", "critic.Values"])
async def test_an_answer_of_another_length_is_refused(name: str) -> None:
    call = BY_NAME[name]
    short = type(call.reply)(**{call.reply.DESCRIPTOR.fields[0].name: pack_floats(ROWS[:1])})
    async with call.serve(Script(short)) as channel:
        with pytest.raises(InvalidArgument, match="values for 3 response tokens"):
            await call.ask(channel, 5)


async def test_train() -> None:
    request, metrics = await ask("critic.Train")
    assert (request.step, request.epochs, request.minibatch_size, request.seed) == (3, 2, 4, 5)
    assert unpack_floats(request.values, "x").tolist() == unpack_floats(request.returns, "x").tolist() == [1, 2, 3]
    assert len(unpack_pairs(request.pairs, vocab_size=11, max_length=9)[0]) == 2
    assert metrics == {"loss": 0.5}


async def test_save_and_infos() -> None:
    request, path = await ask("critic.Save")
    assert (request.path, path) == ("x", "/x")
    for name in ("rollout.Info", "reward.Info", "reference.Info", "critic.Info"):
        assert await ask(name) == (common_pb2.InfoRequest(), BY_NAME[name].reply)
