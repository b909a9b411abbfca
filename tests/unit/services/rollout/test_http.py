"""The HTTP door of a replica: whose share a request has, and what becomes of errors."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quartet.config.limits import LimitsConfig
from quartet.security.session_key import KEY
from quartet.serving.desk import Desk
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.errors import ResourceExhausted, ServiceError
from services.rollout import http
from services.rollout.http import Door
from services.rollout.metrics import METRICS, Line
from services.rollout.session_holder import OpenSession
from services.rollout.session_trajectory import as_json
from tests.unit.local_sessions import LocalSessions


class Completions:
    """Notes what it is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[str, bytes, Share]] = []
        self.sessions: list[OpenSession | None] = []
        self.sampled = 7

    async def answer(self, path: str, body: bytes, share: Share, session: OpenSession | None) -> Response:
        self.asked.append((path, body, share))
        self.sessions.append(session)
        if self.error:
            raise self.error
        return JSONResponse({})

    async def models(self) -> Any:
        return {"data": [{"id": "mine"}]}

    async def tokenizer_info(self) -> Any:
        return {"eos_token": "<eos>"}


async def well() -> None:
    """Raises nothing."""


async def ill() -> None:
    raise RuntimeError("/home/me: stuck")


async def numbers() -> list[list[Line]]:
    return [[(line, {"replica": name}, 3) for line in ("policy_version", "unknown")] for name in ("a", "b")]


def request(path: str, body: bytes = b"", **headers: str) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": f"/rollout{path}", "root_path": "/rollout", "headers": sent}
    return Request(scope, receive)


def made(completions: Completions, sessions: LocalSessions | None = None, health: Any = well) -> Door:
    return Door(completions, health, sessions or LocalSessions(), numbers, Desk(LimitsConfig()))


@pytest.mark.parametrize(
    ("headers", "share"),
    [
        ({}, Share("anonymous", Purpose.FOREIGN)),
        ({"quartet_run": "eval"}, Share("eval", Purpose.FOREIGN)),
        ({"quartet_identity": "me", "quartet_role": "trainer"}, Share("me", Purpose.FOREIGN)),
        (
            {"quartet_identity": "me", "quartet_role": "trainer", "quartet_purpose": "evaluation"},
            Share("me", Purpose.EVALUATION),
        ),
        (
            {"quartet_identity": "me", "quartet_role": "trainer", "quartet_purpose": "training"},
            Share("me", Purpose.EVALUATION),
        ),
        (
            {"quartet_identity": "me", "quartet_role": "sampler", "quartet_purpose": "evaluation"},
            Share("me", Purpose.FOREIGN),
        ),
    ],
)
async def test_a_request_waits_in_its_callers_share_and_never_as_training(
    headers: dict[str, str], share: Share
) -> None:
    completions = Completions()
    got = await made(completions).answer(request("/v1/completions", b"{}", **headers))
    assert got.status_code == 200
    assert completions.asked == [("/v1/completions", b"{}", share)]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ResourceExhausted("prompt: full", 3), 429, "prompt: full"),
        (ServiceError("broken"), 500, "broken"),
        (ValueError("/home/me/secret"), 500, "internal error (ValueError); see the log"),
    ],
)
async def test_errors_are_answers(error: Exception, status: int, message: str) -> None:
    got = await made(Completions(error)).answer(request("/v1/chat/completions"))
    assert (got.status_code, json.loads(bytes(got.body))["error"]["message"]) == (status, message)


async def test_health_is_the_replicas() -> None:
    assert (await made(Completions()).answer(request("/health"))).status_code == 200
    got = await made(Completions(), health=ill).answer(request("/health"))
    assert got.status_code == 503
    assert b"/home/me" not in bytes(got.body)


SESSION = f"session-{'a' * 32}"


def door_of(completions: Completions, sessions: LocalSessions | None = None) -> Any:
    door = made(completions, sessions)

    async def asked(path: str, body: Any, name: str = "me", session: str = SESSION, **more: str) -> tuple[int, Any]:
        headers = {"quartet_identity": name, "quartet_role": "sampler", "quartet_session": session} | more
        got = await door.answer(request(path, json.dumps(body).encode(), **headers))
        return got.status_code, json.loads(bytes(got.body))

    return asked


async def test_a_session_from_its_start_to_its_trajectory() -> None:
    completions = Completions()
    asked = door_of(completions)
    task = {"task_id": "t", "group_size": 1, "temperature": 0.7}
    assert await asked("/rl/start_session", task, **{KEY: "qs~key"}) == (
        *(200, {"session_id": SESSION, "api_key": "qs~key", "model": "mine"}),
    )
    assert (await asked("/v1/chat/completions", {}, quartet_role="session"))[0] == 200
    [session] = completions.sessions
    assert session
    assert (session.owner, session.name) == ("me", SESSION)
    assert (await session.begun([])).terms.temperature == 0.7
    assert (await asked("/rl/set_reward", {"reward": 0.5}, quartet_role="session"))[0] == 200
    assert await asked("/rl/end_session", {}) == (200, {"session_id": SESSION, "interaction_count": 0})
    status, told = await asked("/rl/trajectory", {"session_id": SESSION}, session="")
    assert (status, told["task_id"], told["reward"], told["sequences"]) == (200, "t", 0.5, [])
    # The tokens are not lost with an answer: what removes them does not bring them.
    removed = await asked("/rl/trajectory", {"session_id": SESSION, "remove": True}, session="")
    assert removed == (200, {"session_id": SESSION, "removed": True})
    assert (await asked("/rl/trajectory", {}))[0] == 404


async def test_several_sessions_are_started_told_and_removed_by_one_request_each() -> None:
    sessions = LocalSessions()
    asked, of_all = door_of(Completions(), sessions), {KEY: f"qs~me~{SESSION}~seal"}
    several = {"temperature": 0.7, "sessions": [{"task_id": "a", "seed": 1}, {"task_id": "b"}]}
    status, told = await asked("/rl/start_session", several, **of_all)
    names = [f"{SESSION}-{place}" for place in range(2)]
    assert (status, told["model"], [each["session_id"] for each in told["sessions"]]) == (200, "mine", names)
    assert [each["api_key"].split("~")[:3] for each in told["sessions"]] == [["qs", "me", name] for name in names]
    terms = [sessions.held.begun("me", name, [], "t").terms for name in names]
    assert [(each.temperature, each.seed) for each in terms] == [(0.7, 1), (0.7, None)]
    # The same again, for keys of a proxy that was restarted.
    assert await asked("/rl/start_session", several, **of_all) == (status, told)
    status, told = await asked("/rl/trajectory", {"session_ids": [*names, "gone"]})
    assert status == 200
    assert [each.get("task_id") for each in told["trajectories"]] == ["a", "b", None]
    assert "gone is not here" in told["trajectories"][2]["error"]
    assert await asked("/rl/trajectory", {"remove_ids": names}) == (200, {"trajectories": []})
    assert sessions.held.counts()["sessions"] == 0
    status, told = await asked("/rl/start_session", several, session=names[0], **of_all)
    assert (status, "X-Session-ID: is that of one session" in told["error"]["message"]) == (400, True)


class SlowSessions(LocalSessions):
    """Sessions that tell trajectories when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.let = asyncio.Event()

    async def ask(self, method: str, *args: Any) -> Any:
        if method == "trajectory":
            self.asked.append(args[0])
            await self.let.wait()
        return await super().ask(method, *args)


async def test_one_trajectory_is_written_at_a_time_and_callers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def written(told: Any) -> str:
        threads.append(threading.current_thread())
        return as_json(told)

    monkeypatch.setattr(http, "as_json", written)
    sessions = SlowSessions()
    asked = door_of(Completions(), sessions)
    for name in ("a", "b"):
        sessions.held.start(name, name, "t")
    asking = [asyncio.create_task(asked("/rl/trajectory", {"session_id": name}, name)) for name in "aaaab"]
    while not sessions.asked:
        await asyncio.sleep(0)
    # It takes nothing from other requests about sessions.
    assert (await asked("/rl/end_session", {}, "b", "b"))[0] == 200
    assert sessions.asked == ["a"]
    sessions.let.set()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 5
    assert sessions.asked.index("b") <= 2
    assert len(threads) == 5
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/rl/set_reward", {}, 400, "reward: missing"),
        ("/rl/set_reward", {"reward": None}, 400, "reward: missing"),
        ("/rl/set_reward", {"reward": "1"}, 400, "reward: a str; should be a number from -1e+30 to 1e+30"),
        ("/rl/set_reward", {"reward": True}, 400, "reward: a bool; should be a number"),
        ("/rl/set_reward", {"reward": []}, 400, "reward: a list; should be a number"),
        ("/rl/set_reward", {"reward": 1e31}, 400, "reward: 1e+31; should be a number"),
        ("/rl/set_reward", {"reward": -(10**400)}, 400, "reward: -1000"),
        ("/rl/set_reward", {"reward": float("nan")}, 400, "the body is not JSON: NaN"),
        ("/rl/set_reward", {"reward": 1, "interaction_id": "c"}, 400, "interaction_id: 'c' is no response"),
        ("/rl/set_reward", {"reward": 1, "session": "s"}, 400, "session: not a field of /rl/set_reward"),
        ("/rl/start_session", {"temperature": 0}, 400, "temperature: 0; should be above 0 in a session"),
        ("/rl/start_session", {"group_size": 2}, 400, "group_size: 2; should be 1"),
        ("/rl/start_session", {"task_id": "a" * 257}, 400, "task_id: should be a text of 256"),
        ("/rl/trajectory", {"session_id": 5}, 400, "X-Session-ID: missing"),
        ("/rl/trajectory", {"session_id": "other"}, 404, "other is not here"),
    ],
)
async def test_requests_about_sessions_that_are_wrong(path: str, body: Any, status: int, message: str) -> None:
    asked = door_of(Completions())
    await asked("/rl/start_session", {})
    got, told = await asked(path, body)
    assert got == status
    assert told["error"]["message"].startswith(message)
    for route in ("/rl/set_reward", "/rl/end_session", "/rl/trajectory", "/rl/start_session"):
        assert (await asked(route, {}, session=""))[0] == 400


async def test_the_numbers_of_all_replicas_are_told_for_prometheus() -> None:
    door = made(Completions())
    for path in ("/health", "/v1/models", "/v1/models", "/rl/end_session"):
        await door.answer(request(path, b"{}"))
    got = await door.answer(request("/metrics"))
    assert (got.status_code, got.media_type) == (200, "text/plain; version=0.0.4")
    lines = bytes(got.body).decode().splitlines()
    assert [line for line in lines if "policy_version" in line] == [
        "# HELP quartet_rollout_policy_version Version of the weights that the replica serves.",
        "# TYPE quartet_rollout_policy_version gauge",
        *('quartet_rollout_policy_version{replica="a"} 3', 'quartet_rollout_policy_version{replica="b"} 3'),
    ]
    assert {"quartet_rollout_sessions 0", "quartet_rollout_session_forks_total 0"} <= set(lines)
    assert all(re.fullmatch(r"# (HELP|TYPE) .+|quartet_rollout_\w+(\{.+\})? [0-9.e+-]+", line) for line in lines)
    assert sorted(door.lines, key=str) == [
        ("http_requests_total", {"path": "/health", "status": "200"}, 1),
        ("http_requests_total", {"path": "/metrics", "status": "200"}, 1),
        ("http_requests_total", {"path": "/rl/end_session", "status": "400"}, 1),
        ("http_requests_total", {"path": "/v1/models", "status": "200"}, 2),
        ("http_sampled_tokens_total", {}, 7),
    ]
    assert {name for name, *_ in door.lines} <= METRICS.keys()
