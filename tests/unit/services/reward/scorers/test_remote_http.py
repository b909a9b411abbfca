"""A scorer of another reward service over HTTP: the reward service's own door, and a server on loopback that answers
whatever a response says."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quartet.config.base import ConfigError
from quartet.wire.pairs import Pair
from services.reward.scorers.function import FunctionScorer
from tests.unit import reward_door
from tests.unit.reward_door import scorers_of_all_kinds
from tests.unit.scorer_calls import Call, batcher, make, scored

HASH = "a" * 64
SCORED: dict[str, Any] = {"outcome": "scored", "scores": {"score": 2.0}, "reason": None}
ALL: dict[str, Any] = {"scorer": {"name": "model:far", "model_hash": HASH}, "results": [SCORED]}


def remote(url: str, **fields: Any) -> FunctionScorer:
    settings = {"kind": "remote", "url": url, "workers": 1} | fields
    return make(settings)


async def ask(made: FunctionScorer, *pairs: Pair) -> Call:
    return await scored(batcher(made), pairs)


async def test_the_door_scores_pairs_with_all_that_is_known_of_them(policy_folder: Path, reward_folder: Path) -> None:
    scorers = scorers_of_all_kinds(str(reward_folder), str(policy_folder))
    async with reward_door.reward_door(scorers) as port:
        url = f"http://127.0.0.1:{port}/reward"
        made = await asyncio.to_thread(remote, url, scorer="length")
        reward_door.SEEN.clear()  # of pairs that other tests have sent from this process
        talk = ({"role": "user", "content": "w5"}, {"role": "assistant", "content": "w7 w8"})
        pairs = [
            Pair("w5", "w7 w8", "yes", ended=False, columns={"topic": 3}, group=8),
            Pair("w5", "w14", group=9),
            Pair("w5", "w15", group=9),
            Pair("w5", "w16", group=9),
            Pair("w5", "w17", group=9),
        ]
        call = await ask(made, *pairs)
        assert call.told == [5.0, "FAILED", "NOT_APPLICABLE", "REFUSED", "NOT_FINITE"]
        assert call.reason(3) == "the judge declined"
        seen = next(each for each in reward_door.SEEN if each.label == "yes")
        assert (seen.prompt, seen.response, seen.ended, dict(seen.columns)) == ("w5", "w7 w8", False, {"topic": 3})
        others = [each.group for each in reward_door.SEEN if each.response in ("w14", "w15", "w16", "w17")]
        assert None not in (seen.group, *others)
        assert seen.group not in others
        await ask(made, *[Pair("w5", "w7", label=str(each), group=each % 2) for each in range(600)])
        await ask(made, *[Pair("w5", "w7", label=str(each), group=each % 2) for each in range(2)])
        *_, one, other = reward_door.SEEN
        assert len({each.group for each in reward_door.SEEN}) == 2  # of three requests
        assert one.group != other.group
        assert (await ask(made, Pair("", "w7 w8", messages=talk))).told == [5.0]
        assert [dict(each) for each in reward_door.SEEN[-1].messages] == [*talk]
        named = await asyncio.to_thread(remote, url, scorer="two", names=["long", "words"])
        assert (await ask(named, Pair("w5", "w7 w8"))).results[0].tolist() == [5.0, 2.0]  # type: ignore[union-attr]
        for none in ("none", ""):
            with pytest.raises(ConfigError, match=f"scorer: '{none}' is none of those there are: length, taste, two"):
                await asyncio.to_thread(remote, url, scorer=none)


class Stranger(ThreadingHTTPServer):
    """Describes one scorer, and answers requests for scores as `answer` does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[BaseHTTPRequestHandler, Any], None] = told(ALL)
        self.hash = HASH
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self.end = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/reward"


class Handler(BaseHTTPRequestHandler):
    server: Stranger

    def do_GET(self) -> None:
        """The scorers."""
        self.server.asked.append(self.path)
        card: dict[str, Any] = {"id": "far", "scorer": "model:far", "model_hash": self.server.hash}
        card |= {"scores": ["score"], "max_model_len": 9}
        say(self, 200, json.dumps({"data": [card]}).encode())

    def do_POST(self) -> None:
        """The scores."""
        self.server.asked.append(self.path)
        self.server.keys.add(self.headers["authorization"])
        self.server.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def say(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def told(answer: Any, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return lambda handler, asked: say(handler, status, body, **headers)


@contextmanager
def serving() -> Iterator[Stranger]:
    server = Stranger()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.end.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with serving() as server:
        yield server


def result(**changed: Any) -> dict[str, Any]:
    return ALL | {"results": [SCORED | changed]}


GARBAGE: dict[str, Any] = {
    "no JSON": told(b"<html>"),
    "no object": told([1]),
    "nothing": told(b""),
    "no results": told({"scorer": ALL["scorer"]}),
    "another length": told(ALL | {"results": [SCORED, SCORED]}),
    "none at all": told(ALL | {"results": []}),
    "no number": told(result(scores={"score": "2"})),
    "true": told(result(scores={"score": True})),
    "null": told(result(scores={"score": None})),
    "no scores": told(result(scores=None)),
    "empty scores": told(result(scores={})),
    "NaN": told(
        b'{"scorer": {"name": "a", "model_hash": "%s"}, "results": [' % HASH.encode()
        + b'{"outcome": "scored", "scores": {"score": NaN}, "reason": null}]}'
    ),
    "infinite": told(json.dumps(ALL).replace("2.0", "1e999").encode()),
    "other names": told(result(scores={"other": 2.0})),
    "one name too many": told(result(scores={"score": 2.0, "other": 1.0})),
    "a number without a score": told(result(outcome="failed", reason="no")),
    "no such outcome": told(result(outcome="fine")),
    "deep": told(b"[" * 100_000),
    "another scorer": told(ALL | {"scorer": {"name": "model:far", "model_hash": "b" * 64}}),
    "an error with a score": told(ALL, 500),
    "nobody": told(ALL, 401),
    "elsewhere": told(ALL, 404),
    "moved": told(ALL, 302, Location="/reward/v1/elsewhere"),
    "moved for good": told(ALL, 308, Location="/reward/v1/elsewhere"),
    "packed": told(ALL, 200, Content_Encoding="gzip"),
}
"""Fault of an answer -> the answer."""


async def test_what_is_no_answer_is_an_outcome_and_never_a_number(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url, pair_timeout_s=1.0)
    assert (await ask(made, Pair("", "a"))).told == [2.0]
    for name, answer in GARBAGE.items():
        stranger.answer = answer
        call = await ask(made, Pair("", "a"))
        if name == "packed":  # it says so, and is not
            assert call.told == [2.0]
        else:
            assert call.told == ["FAILED"], name
    stranger.answer = told(json.dumps(ALL).replace("2.0", "1e300").encode())
    assert (await ask(made, Pair("", "a"))).told == ["NOT_FINITE"]
    assert {*stranger.asked} == {"/reward/v1/models", "/reward/v1/rewards"}
    assert stranger.keys == {None}


async def test_a_proxy_gets_no_key_that_is_for_this_machine(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("REMOTE_KEY", "sk-7")
        known: dict[str, Any] = {"environment": ["HTTP_PROXY"]}
        made = await asyncio.to_thread(remote, stranger.url, api_key="REMOTE_KEY", **known)
        assert (await ask(made, Pair("", "a"))).told == [2.0]
        assert stranger.keys == {"Bearer sk-7"}
        assert proxy.asked == []
        elsewhere = await asyncio.to_thread(remote, "http://rewards.invalid/reward", **known)
        assert (await ask(elsewhere, Pair("", "a"))).told == [2.0]
        assert {*proxy.asked} == {f"http://rewards.invalid/reward/v1/{path}" for path in ("models", "rewards")}


async def test_an_answer_is_bounded_in_size_and_in_time(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url, pair_timeout_s=1.0)

    def endless(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while not stranger.end.is_set():
                handler.wfile.write(b" " * 65_536)

    def slow(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while not stranger.end.wait(0.05):
                handler.wfile.write(b" ")

    stranger.answer = endless
    call = await ask(made, Pair("", "a"))
    assert call.told in (["FAILED"], ["TIMEOUT"])  # whichever bound the machine meets first
    stranger.answer = slow
    call = await ask(made, Pair("", "a"))
    assert (call.told, call.reason(0)) == (["TIMEOUT"], f"{stranger.url}: DeadlineExceeded")
    assert made._workers.source  # the process is the same one, and goes on
    stranger.answer = told(ALL)
    assert (await ask(made, Pair("", "a"))).told == [2.0]


async def test_a_pair_that_is_refused_costs_no_other_its_score(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url)

    def picky(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        responses = [each["response"] for each in asked["pairs"]]
        status = next((faults[each] for each in responses if each in faults), 200)
        say(handler, status, json.dumps(ALL | {"results": [SCORED] * len(responses)}).encode())

    faults = {"wrong": 400, "odd": 422, "large": 413}
    stranger.answer = picky
    call = await ask(made, *[Pair("", each) for each in ("a", "wrong", "b", "large", "c", "odd")])
    assert call.told == [2.0, "FAILED", 2.0, "FAILED", 2.0, "FAILED"]


async def test_one_scorer_scores_all_requests_of_a_call(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url)
    others = ALL["scorer"]

    def answer(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        count = len(asked["pairs"])
        scorer = ALL["scorer"] if count == 512 else others
        say(handler, 200, json.dumps({"scorer": scorer, "results": [SCORED] * count}).encode())

    stranger.answer = answer
    stranger.asked.clear()
    assert (await ask(made, *[Pair("", "a")] * 600)).told == [2.0] * 600
    assert len(stranger.asked) == 2  # no more than 512 pairs in one
    others = {"name": "model:far", "model_hash": "b" * 64}
    call = await ask(made, *[Pair("", "a")] * 600)
    assert (call.told, call.reason(0)) == (["FAILED"] * 600, f"{stranger.url}: InvalidReply")


async def test_a_scorer_that_has_not_started_is_not_taken(stranger: Stranger) -> None:
    stranger.hash = ""
    with pytest.raises(ConfigError, match="scorer far has not started yet"):
        await asyncio.to_thread(remote, stranger.url)


async def test_pairs_of_several_forms_are_several_requests_of_which_each_has_its_time(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url)
    told, limits = list[Any](), list[float]()

    def lengths(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        told.append([(type(each["prompt"]), each.get("group")) for each in asked["pairs"]])
        limits.append(round(asked["pair_timeout_s"], 2))
        if "late" in [each["response"] for each in asked["pairs"]]:
            stranger.end.wait(2.0)
        results = [SCORED | {"scores": {"score": len(each["response"])}} for each in asked["pairs"]]
        say(handler, 200, json.dumps(ALL | {"results": results}).encode())

    stranger.answer = lengths
    talk = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "abc"})
    pairs = [
        Pair("", "a", group=7, timeout_s=0.5),
        Pair("Why?", "abc", messages=talk, group=7),
        Pair("", "late"),
        Pair("", ""),
    ]
    assert (await ask(made, *pairs)).told == [1.0, 3.0, 4.0, 0.0]
    assert sorted(told, key=str) == [[(list, 7)], [(str, 7)], [(str, None)] * 2]
    assert sorted(limits) == [0.36, 43.2, 43.2]  # of 0.5 and 60 s, of which an answer takes some


async def test_the_groups_of_all_workers_are_of_one_whole(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url, workers=2)
    wholes, both = list[str | None](), threading.Barrier(2)

    def noted(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        wholes.append(asked.get("groups_of"))
        if "groups_of" in asked:
            both.wait(60)  # so that another worker has the other call
        told(ALL)(handler, asked)

    stranger.answer = noted
    await asyncio.gather(*(ask(made, Pair("", "a", group=7)) for _ in range(2)))
    await ask(made, Pair("", "a"))
    first, second, none = wholes
    assert first is not None
    assert (second, none) == (first, None)


async def test_a_busy_service_is_asked_again_with_the_key(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_KEY", "secret")
    made = await asyncio.to_thread(remote, stranger.url, api_key="FAR_KEY")

    def busy(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        stranger.answer = told(ALL)
        say(handler, 429, b"{}", Retry_After="nan")

    stranger.answer = busy
    assert (await ask(made, Pair("", "a"))).told == [2.0]
    assert stranger.keys == {"Bearer secret"}
    assert stranger.asked.count("/reward/v1/rewards") == 2


async def test_a_service_whose_function_is_defective_is_asked_once(stranger: Stranger) -> None:
    made = await asyncio.to_thread(remote, stranger.url, pair_timeout_s=5.0)
    stranger.answer = told({}, 409)
    call = await ask(made, Pair("", "a"))
    assert (call.told, call.reason(0)) == (["FAILED"], f"{stranger.url}: FailedPrecondition")
    assert stranger.asked.count("/reward/v1/rewards") == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target": "host:1"}, "one of them"),
        ({"url": ""}, "one of them"),
        ({"url": "host:1/reward"}, "should be http"),
        ({"url": "http://me:secret@host/reward"}, "should be http"),
        ({"application": "reward"}, "application: belongs to target"),
        ({"url": "", "target": "host:1", "api_key": "KEY"}, "api_key: belongs to url"),
        ({"url": "http://host/reward", "api_key": "KEY"}, "in the clear"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        remote(**{"url": "https://host/reward"} | fields)
