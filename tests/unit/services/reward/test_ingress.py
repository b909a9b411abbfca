"""Several scorers by name behind one deployment: real replicas, called as Serve's handles call them."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from ray.exceptions import ActorDiedError, RayTaskError

from protos import common_pb2
from protos import reward_pb2 as pb
from quartet.wire.codec import unpack_floats
from quartet.wire.errors import Internal, InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from services.reward import ingress as module
from services.reward.config import RewardConfig
from services.reward.ingress import Ingress
from services.reward.replica import Reward
from tests.http_requests import ask
from tests.trajectories import of
from tests.unit.contexts import Context
from tests.unit.handles import Response
from tests.unit.reward_door import Scorers, reward_door
from tests.unit.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


class Handle:
    """A replica as Serve's handle reaches it: in another process, with errors that Ray wraps; or lost, or hanging."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.state = "not connected"
        self.calls: list[tuple[str, Response]] = []
        """Method and answer of each call."""

    def options(self) -> "Handle":
        """Has Serve make the handle's router, for which it asks others, and waits."""
        self.state = "alive"
        return self

    def __getattr__(self, method: str) -> Any:
        assert self.state != "not connected"
        return Remote(self, method)


class Remote:
    def __init__(self, handle: Handle, method: str) -> None:
        self._handle, self._method = handle, method

    def remote(self, *arguments: Any) -> Response:
        response = Response(self._answer(*arguments))
        self._handle.calls.append((self._method, response))
        return response

    async def _answer(self, *arguments: Any) -> Any:
        if self._handle.state == "lost":
            raise ActorDiedError
        if self._handle.state == "hangs":
            await asyncio.Event().wait()
        method: Callable[..., Awaitable[Any]] = getattr(self._handle.replica, self._method)
        try:
            return pickle.loads(pickle.dumps(await method(*pickle.loads(pickle.dumps(arguments)))))
        except Exception as error:
            cause = pickle.loads(pickle.dumps(error))
            raise RayTaskError(self._method, "a secret traceback", cause).as_instanceof_cause() from None


@pytest.fixture
def handles(policy_folder: Path) -> dict[str, Any]:
    scorers = {
        "words": {"kind": "function", "function": "tests.scorers:words", "tokenizer": str(policy_folder)},
        "count": {"kind": "function", "function": "tests.scorers:count", "limits": {"max_call_rows": 2}},
        "breaks": {"kind": "function", "function": "tests.scorers:count"},
    }
    hosted = RewardConfig.parse({"scorers": scorers}, "reward.args").hosted
    return {name: Handle(Reward.func_or_class(each, name=name)) for name, each in hosted.items()}  # type: ignore[attr-defined]


@pytest.fixture
def ingress(handles: dict[str, Any]) -> Any:
    return Ingress.func_or_class(handles, dict.fromkeys(handles, ()))  # type: ignore[attr-defined]


def texts(count: int = 1, **fields: Any) -> pb.ScoreRequest:
    pairs = pb.TextPairs(prompts=["w5"] * count, responses=["w7 w8 w9"] * count)
    return pb.ScoreRequest(texts=pairs, **fields)


async def test_a_request_is_scored_by_the_scorer_that_it_names(ingress: Any) -> None:
    words, count = [await ingress.Score(texts(scorer=name), Context()) for name in ("words", "count")]
    assert unpack_floats(words.scores, "scores").tolist() == pytest.approx([1000.3])
    assert words.scorer.name == "function:tests.scorers:words"
    assert count.scorer.name == "function:tests.scorers:count"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "scorer: required, as there are several: breaks, count, words"),
        ("word", "scorer: 'word' is none of those there are: breaks, count, words"),
        ("\n" * 1000, f"scorer: {chr(10) * 64!r} is none of those there are: breaks, count, words"),
    ],
)
async def test_a_wrong_name_is_told_the_names_that_there_are(ingress: Any, name: str, message: str) -> None:
    context = Context()
    with pytest.raises(InvalidArgument):
        await ingress.Score(texts(scorer=name), context)
    assert (context.code, context.details) == (grpc.StatusCode.INVALID_ARGUMENT, message)


async def test_errors_arrive_as_the_scorer_raised_them(ingress: Any, handles: dict[str, Any]) -> None:
    context = Context()
    tokens = pb.ScoreRequest(tokens=of([[5]], [[6]]).pack(), scorer="count")
    with pytest.raises(InvalidArgument):
        await ingress.Score(tokens, context)
    assert context.details == "tokens: the scorer has no tokenizer; send texts or conversations"
    with pytest.raises(ResourceExhausted) as caught:
        await ingress.Score(texts(3, scorer="count"), context)
    assert (caught.value.retry_after_s, context.code) == (None, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert context.details == "texts: 3 rows, but a call may hold 2; send it in several"
    handles["count"].replica._admission = None
    with pytest.raises(Internal):
        await ingress.Score(texts(scorer="count"), context)
    assert context.details == "Score: internal error (AttributeError); see the log"


async def test_a_scorer_that_is_lost_or_hangs_touches_no_other(ingress: Any, handles: dict[str, Any]) -> None:
    handles["words"].state, handles["breaks"].state = "lost", "hangs"
    before = await ingress.Info(common_pb2.InfoRequest(), Context())
    assert {each.name: each.identity.name for each in before.scorers} == {
        "words": "",
        "count": "function:tests.scorers:count",
        "breaks": "",
    }
    context = Context()
    with pytest.raises(Unavailable):
        await ingress.Score(texts(scorer="words"), context)
    assert context.details == "scorer words: the replica died while it answered"
    reply = await ingress.Score(texts(scorer="count"), Context())
    assert not reply.outcomes
    assert (await ingress.Check(health_pb2.HealthCheckRequest())).status == SERVING
    await ingress.check_health()


async def test_a_call_ends_behind_the_ingress_when_its_caller_leaves(ingress: Any, handles: dict[str, Any]) -> None:
    handles["count"].state = "hangs"
    left = asyncio.create_task(ingress.Score(texts(scorer="count"), Context()))
    await until(lambda: bool(handles["count"].calls))
    left.cancel()
    [(_, behind)] = handles["count"].calls
    await until(behind.call.done)
    assert behind.call.cancelled()


async def test_a_scorer_that_does_not_describe_itself_in_time_is_not_left_with_the_question(
    ingress: Any, handles: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    handles["breaks"].state = "hangs"
    await ingress.infos()
    [(_, behind)] = handles["breaks"].calls
    await until(behind.call.cancelled)


async def test_over_http_a_scorer_that_hangs_is_not_asked_by_calls_of_others(
    ingress: Any, handles: dict[str, Any]
) -> None:
    handles["breaks"].state = "hangs"
    body = {"text_1": "w5", "text_2": "w7 w8"}
    async with reward_door(Scorers(ingress)) as port:
        for path, more in (("/score", {"model": "count"}), ("/scorers/count/score", {})):
            assert (await ask(port, f"/reward{path}", body | more)).status == 200
        for path, more in (("/score", {"model": "other"}), ("/scorers/other/score", {})):
            assert (await ask(port, f"/reward{path}", body | more)).status == 404
    assert handles["breaks"].calls == []


async def test_a_text_that_is_not_tokenised_in_time_is_said_to_be_so(
    ingress: Any, handles: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENS_S", 0.1)
    handles["words"].state = "hangs"
    async with reward_door(Scorers(ingress)) as port:
        got = await ask(port, "/reward/tokenize", {"model": "words", "prompt": "w5"})
    assert (got.status, got.message) == (503, "scorer words: no answer within 0.1 s")
    [(_, behind)] = handles["words"].calls
    await until(behind.call.cancelled)


async def test_over_http_health_is_that_of_the_scorers(ingress: Any, handles: dict[str, Any]) -> None:
    async with reward_door(Scorers(ingress)) as port:
        handles["words"].state = "lost"
        for path, status in (("", 200), ("/scorers/count", 200), ("/scorers/words", 503), ("/scorers/other", 404)):
            assert (await ask(port, f"/reward{path}/health")).status == status, path
        for handle in handles.values():
            handle.state = "lost"
        assert (await ask(port, "/reward/health")).status == 503


async def test_over_grpc_health_is_that_of_the_scorer_that_is_named(
    ingress: Any, handles: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serving(service: str) -> bool:
        answer = await ingress.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(answer.status == SERVING)

    handles["words"].state = "lost"
    names = ("reward", "reward/count", "reward/words", "reward/other", "reward/count/more")
    assert [await serving(name) for name in names] == [True, True, False, False, False]
    monkeypatch.setattr(module, "HEALTH_S", 0.1)
    handles["breaks"].state = "hangs"
    assert not await asyncio.wait_for(serving("reward/breaks"), 20)


async def test_info_is_remembered_of_a_scorer_that_no_longer_answers(ingress: Any, handles: dict[str, Any]) -> None:
    before = await ingress.Info(common_pb2.InfoRequest(), Context())
    assert [each.name for each in before.scorers] == ["words", "count", "breaks"]
    assert [bool(each.model.tokenizer_hash) for each in before.scorers] == [True, False, False]
    for handle in handles.values():
        handle.state = "lost"
    assert await ingress.Info(common_pb2.InfoRequest(), Context()) == before
    assert (await ingress.Check(health_pb2.HealthCheckRequest())).status != SERVING


async def test_a_single_scorer_may_be_called_by_its_name_or_without(handles: dict[str, Any]) -> None:
    replica = handles["count"].replica
    for name in ("count", ""):
        assert (await replica.Score(texts(scorer=name), Context())).scorer.name == "function:tests.scorers:count"
    with pytest.raises(ServiceError, match="scorer: 'words' is none of those there are: count"):
        await replica.Score(texts(scorer="words"), Context())
