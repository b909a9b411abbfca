"""Responses of an endpoint of OpenAI's protocol: what is asked, what is repeated, and what is given up."""

import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.evaluation.endpoint import Endpoint
from orchestrator.evaluation.journal import Answer
from orchestrator.evaluation.rows import Row
from quartet.config.base import ConfigError
from quartet.wire.errors import NotFound, Unauthenticated, Unavailable
from tests.unit.openai_endpoint import Asked, Reply, chat, completion, serving

TEXT = Row(1, {}, "2 + 2 =", (), None)
TALK = Row(2, {}, "", ({"role": "user", "content": "hi"},), None)


def endpoint(address: str, key: str | None = None, **options: Any) -> Endpoint:
    given: dict[str, Any] = {"chat": False, "seed": None, "samples": 1, "timeout_s": 20.0} | options
    return Endpoint(address, {"model": "m", "temperature": 0.5}, key, **given)


def in_turn(*replies: Reply) -> Any:
    left: Iterator[Reply] = iter(replies)
    return lambda asked: next(left)


async def test_texts_are_completed_and_messages_are_answered() -> None:
    def answer(asked: Asked) -> Reply:
        return chat("hello", policy_version=7) if asked.path == "/v1/chat/completions" else completion("4", "length")

    with serving(answer) as (address, asked):
        source = endpoint(address + "/", key="k")
        assert await source.respond(0, TEXT, 0) == Answer("4", ended=False)
        assert await source.respond(1, TALK, 0) == Answer("hello", ended=True, policy_version=7)
        assert await endpoint(address, chat=True).respond(0, TEXT, 0) == Answer("hello", ended=True, policy_version=7)
    assert [(each.path, each.key) for each in asked] == [
        ("/v1/completions", "Bearer k"),
        ("/v1/chat/completions", "Bearer k"),
        ("/v1/chat/completions", None),
    ]
    assert asked[0].body == {"prompt": "2 + 2 =", "model": "m", "temperature": 0.5}
    assert asked[1].body == {"messages": [{"role": "user", "content": "hi"}], "model": "m", "temperature": 0.5}
    assert asked[2].body["messages"] == [{"role": "user", "content": "2 + 2 ="}]


async def test_every_sample_has_a_seed_of_its_own() -> None:
    with serving(lambda asked: completion("x")) as (address, asked):
        source = endpoint(address, seed=100, samples=3)
        for index in range(2):
            for sample in range(3):
                await source.respond(index, TEXT, sample)
    assert [each.body["seed"] for each in asked] == [100, 101, 102, 103, 104, 105]


@pytest.mark.parametrize(
    "first",
    [
        Reply({"error": {"message": "slow down"}}, 429),
        Reply({}, 500),
        Reply(b"<html>", 502),
        Reply({"detail": "starting"}, 503, {"retry-after": "0"}),
        Reply(b"not JSON"),
        Reply({"choices": []}),
        Reply([1]),
        Reply(b"[" * 100_000),
        Reply(b"[" * 65_000, 502),
        Reply(b"cut off", 502, cut_off=True),
    ],
    ids=lambda reply: f"{reply.status}-{str(reply.body)[:30]}",
)
async def test_failures_that_may_pass_are_repeated(first: Reply) -> None:
    with serving(in_turn(first, completion("4"))) as (address, asked):
        assert await endpoint(address).respond(0, TEXT, 0) == Answer("4", ended=True)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reply", "timeout_s", "problem"),
    [
        (
            Reply({"error": {"message": "full"}}, 503, {"retry-after": "60"}),
            20,
            "no answer in 20 s: status 503: full",
        ),
        (Reply(completion("4" * 300).body, drip_s=0.05), 0.4, "no answer in 0.4 s: it is silent"),
        (Reply({"error": {"message": "full" * 10}}, 503, drip_s=0.05), 0.4, "no answer in 0.4 s: it is silent"),
    ],
)
async def test_an_answer_that_is_late_is_none_and_may_come_another_time(
    reply: Reply, timeout_s: float, problem: str
) -> None:
    with serving(lambda asked: reply) as (address, _):
        answer = await endpoint(address, timeout_s=timeout_s).respond(0, TEXT, 0)
    assert answer == Answer(None, problem=problem, may_pass=True)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply({"error": {"message": "prompt is too long"}}, 400), "status 400: prompt is too long"),
        (Reply({"detail": "bad field"}, 422), "status 422: bad field"),
        (Reply({"error": {"message": "\ud800!"}}, 400), "status 400: ?!"),
        (chat("\ud800"), "the answer holds half of a surrogate pair, which is not a character"),
        (chat(None, "\udc00"), "no text (finish_reason ?)"),
        (chat(None, "tool_calls"), "no text (finish_reason tool_calls)"),
        (
            Reply({"choices": [{"message": {"content": None, "refusal": "I will not"}}]}),
            "declined: I will not",
        ),
    ],
)
async def test_what_is_refused_has_no_response_and_is_asked_once(reply: Reply, problem: str) -> None:
    with serving(lambda asked: reply) as (address, asked):
        assert await endpoint(address).respond(0, TALK, 0) == Answer(None, problem=problem)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, Unauthenticated),
        (403, Unauthenticated),
        (404, NotFound),
        (405, NotFound),
        (307, NotFound),
        (302, NotFound),
    ],
)
async def test_a_wrong_address_model_or_key_ends_the_evaluation(status: int, kind: type[Exception]) -> None:
    """A redirection too: the key is for the address that was given."""
    headers = {"location": "http://127.0.0.1:9/v1"} if status < 400 else {}
    with (
        serving(lambda asked: Reply({"error": {"message": "no"}}, status, headers)) as (address, asked),
        pytest.raises(kind, match=f"{re.escape(address)}: status {status}: no"),
    ):
        await endpoint(address, "secret").respond(0, TEXT, 0)
    assert len(asked) == 1


async def test_an_endpoint_that_is_not_there_ends_the_evaluation() -> None:
    address = "http://127.0.0.1:1/v1"  # a port that has just been closed may be given to another test
    with pytest.raises(Unavailable, match=f"--endpoint {re.escape(address)}: "):
        await endpoint(address, timeout_s=2).respond(0, TEXT, 0)


async def test_a_last_try_without_time_for_an_answer_says_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.evaluation.endpoint.LAST_TRY_S", 60)
    made, over, tried = endpoint("http://127.0.0.1:1/v1", timeout_s=2), threading.Event(), itertools.count()

    def post(*_: Any) -> None:
        if next(tried) == 0:
            raise Unavailable("nothing listens")
        over.wait(20)

    monkeypatch.setattr(made, "_post", post)
    with pytest.raises(Unavailable, match="nothing listens"):
        await made.respond(0, TEXT, 0)
    over.set()
    assert next(tried) == 2


@pytest.mark.parametrize(
    "address", ["api.example/v1", "ftp://a/v1", "http://", "http://a:x/v1", "http://me:secret@a/v1", ""]
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--endpoint: should be such as https://api\.example/v1"):
        endpoint(address)


def test_a_key_does_not_cross_a_network_in_the_clear() -> None:
    with pytest.raises(ConfigError, match="in the clear; use https"):
        endpoint("http://api.example/v1", "secret")
    endpoint("https://api.example/v1", "secret")
    endpoint("http://api.example/v1")
    endpoint("http://localhost:8000/v1", "secret")
