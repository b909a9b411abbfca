"""Every client's deadlines, failures and metadata, over real gRPC; and the messages that each one sends and reads."""

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest

from protos import reference_pb2, reward_pb2
from quartet.columns import Columns
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.client import OPTIONS, ServiceClient, open_channel
from quartet.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from tests.trajectories import of
from tests.unit.service_calls import BY_NAME, CALLS, Call, ask
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import until
from tests.unit.wire import Script

every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


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
    # Tries at 0, 0.05 to 0.1, 0.15 to 0.3, 0.35 to 0.7, 0.75 to 1.5, 1.55 to 3.1 and, as a pause is 2 s at most, 2.55
    # to 5.1 s.
    call, script = BY_NAME["reward.Info"], Script(failures=[grpc.StatusCode.UNAVAILABLE] * 9)
    async with call.serve(script) as channel:
        with pytest.raises(Unavailable, match=r"^reward.Info: said the script$"):
            await call.ask(channel, 3)
    assert 2 <= len(script.requests) <= 7  # fewer where each takes long


async def test_the_deadline_is_that_of_all_tries_together() -> None:
    # The third try, at 0.15 s or later, hangs.
    call, script = BY_NAME["reward.Info"], Script(failures=[grpc.StatusCode.UNAVAILABLE] * 2, hangs=True)
    async with call.serve(script) as channel:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"^reward.Info: no answer within 3 s$"):
            await call.ask(channel, 3)
        assert time.monotonic() - start > 2.9
        async with asyncio.timeout(5):
            await script.cancelled.wait()
    # The server is told what is left: a deadline of 3 s for each try would be 3 s at the third one too.
    assert script.left_s[2] < 2.9


async def test_cancelling_the_caller_ends_the_call_on_the_server() -> None:
    call, script = BY_NAME["reward.Score"], Script(hangs=True)
    async with call.serve(script) as channel:
        asked = asyncio.ensure_future(call.ask(channel, 60))
        await until(lambda: script.requests)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(5):
            await script.cancelled.wait()


INFO = reward_pb2.RewardInfo(scorers=[reward_pb2.ScorerInfo(identity={"name": "n"})])


async def test_the_application_can_have_another_name() -> None:
    call, script = BY_NAME["reward.Info"], Script(INFO)
    async with call.serve(script) as channel, RewardClient(channel, "reward-b") as client:
        await client.info(5)
    assert script.applications == ["reward-b"]


async def test_calls_go_straight_to_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment would be sent what a token on loopback is meant to keep from others."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    call, script = BY_NAME["reward.Info"], Script(INFO)
    async with call.serve(script) as channel, RewardClient(channel) as client:
        await client.info(5)
    assert len(script.requests) == 1


async def test_messages_of_more_than_four_megabytes() -> None:
    ids = np.zeros(5 << 18, np.int32)
    script = Script(reference_pb2.LogprobsResponse(ref_logprobs=bytes(5 << 20)))
    async with BY_NAME["reference.Logprobs"].serve(script) as channel:
        values = await ReferenceClient(channel).logprobs(of([ids[:1]], [ids]), temperature=1.0, timeout_s=30)
    assert len(values) == 5 << 18


async def test_a_pause_that_would_pass_the_deadline_is_not_begun() -> None:
    deadline, error = Deadline(0.04), Unavailable("gone")
    with pytest.raises(Unavailable, match="gone"):
        await Backoff(deadline).wait(error)
    assert 0 < deadline.left_s <= 0.04
    assert Deadline(-1).left_s == 1e-3


class Nowhere(ServiceClient[Any]):
    """A client of no service, whose methods a test gives."""

    SERVICE, STUB = "nowhere", staticmethod(lambda channel: None)  # type: ignore[assignment]


def answering(*after: float | Exception) -> tuple[Any, list[float]]:
    """A method whose calls end after so many seconds or with an error; and the times at which they began."""
    began: list[float] = []

    async def method(request: Any, *, metadata: Any, timeout: float) -> str:
        began.append(asyncio.get_running_loop().time())
        end = after[len(began) - 1]
        if isinstance(end, Exception):
            raise end
        await asyncio.sleep(end)
        return "answer"

    return method, began


@in_virtual_time
async def test_only_a_call_that_any_replica_can_answer_is_sent_to_a_second_one() -> None:
    """Training is done by one: a second call of a step would wait for the first, or do it again elsewhere."""
    client = Nowhere(None)  # type: ignore[arg-type]
    method, began = answering(40)
    assert await client._call(method, "step 1", 60, "Train") == "answer"
    assert began == [0]
    method, began = answering(40, 2)
    assert await client._call(method, "pairs", 60, "Score", anywhere=True) == "answer"
    assert [each - began[0] for each in began] == [0, 5]


class Refused(grpc.RpcError):
    """The call is larger than the service ever admits."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "too many pairs"


@in_virtual_time
async def test_a_call_that_is_refused_for_its_size_is_repeated_unless_it_can_be_divided() -> None:
    client = Nowhere(None)  # type: ignore[arg-type]
    method, began = answering(Refused(), Refused(), 1)
    assert await client._call(method, "a pair", 60, "Score") == "answer"
    assert len(began) == 3
    method, began = answering(Refused())
    with pytest.raises(ResourceExhausted, match=r"^nowhere.Score: too many pairs$"):
        await client._call(method, "pairs", 60, "Score", divisible=True)
    assert len(began) == 1


def test_a_channel_with_tls_differs_from_one_without_by_its_credentials_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[dict[str, Any]] = []

    def open_one(*_: Any, **options: Any) -> None:
        opened.append(options)

    for kind in ("insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc.aio, kind, open_one)
    credentials, interceptors = grpc.local_channel_credentials(), [object()]
    open_channel("a:1", interceptors=interceptors)  # type: ignore[arg-type]
    open_channel("a:1", credentials, interceptors=interceptors)  # type: ignore[arg-type]
    open_channel("a:1", credentials, server_name="b")
    assert opened[0] == opened[1] == {"options": OPTIONS, "interceptors": interceptors}
    assert opened[2]["options"] == [*OPTIONS, ("grpc.ssl_target_name_override", "b")]


async def test_score() -> None:
    request, scores = await ask("reward.Score")
    assert request.labels == ["a", "b"]
    sent = Columns.unpack(request.tokens, {})
    assert [prompt.tolist() for prompt in sent.prompts] == [[5], [6, 7]]
    assert [response.tolist() for response in sent.responses] == [[8, 9], [10]]
    assert (scores.values.tolist(), scores.scorer, scores.model_hash) == ([0.5, -1.0], "n", "h")
