"""The guard of Serve's HTTP port, on Serve's own server: who gets in, to what, and with how much."""

import asyncio
import json
import socket
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import pytest
import yaml
from ray.serve._private import default_impl, http_util
from ray.serve.config import HTTPOptions

from quartet.config.base import ConfigError
from quartet.seams.serve import LARGEST_MESSAGE
from quartet.security import watched
from quartet.security.http_routes import ROUTES
from quartet.security.identity import Caller
from quartet.security.keys.folder import Keys
from quartet.security.policy import Limits
from quartet.security.port import Port
from quartet.serving import proxy
from quartet.serving.door import http_guard, to_replica
from quartet.serving.door.open_calls import OpenCalls
from quartet.wire.json_bounds import DEEPEST, MOST_ELEMENTS, MOST_STRINGS
from tests.http_requests import JSON, Answer, ask, bearer
from tests.unit.front_door import CALLERS, made_keys
from tests.unit.http_door import Replicas, Send, fine, http_door

PATHS = ROUTES["Rollout"]
OF_SESSION = {
    *("/v1/models", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/rl/set_reward", "/rl/end_session"),
}
SAMPLED = {f"/rollout{path}" for path in OF_SESSION | {"/rl/start_session", "/rl/trajectory", "/metrics"}}
SCORED = {
    f"/reward{path}"
    for path in (
        *("/openapi.json", "/v1/models", "/v1/rewards", "/get_reward", "/score", "/classify", "/pooling"),
        *("/tokenize", "/predict", "/rerank", "/verify", "/seed_session", "/metrics"),
        *("/v1/score", "/v1/rerank", "/v2/rerank", "/aggregate_metrics", "/reverify_mode"),
    )
}
HEALTH = {"/rollout/health", "/reward/health"}
ALLOWED = {
    "run-a": SAMPLED | SCORED | HEALTH,
    "client": SAMPLED | HEALTH,
    "evaluator": SCORED | HEALTH,
    "pager": HEALTH | {"/rollout/metrics", "/reward/metrics"},
}
"""The table of roles and routes. Each route is tried by each role, and a further route needs its place here."""
ALL = {f"/{name.lower()}{path}": route.method for name, routes in ROUTES.items() for path, route in routes.items()}
"""Path -> its method, where applications are called as their deployments."""
OPEN = Port(local="open", http=True)
COMPLETIONS = "/rollout/v1/completions"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = made_keys(tmp_path_factory.mktemp("http") / "keys", tokens=True, days=30)
    return made


def guarded(keys: Keys) -> Port:
    return Port(policy=keys.policy, http=True)


def proof(keys: Keys, name: str) -> tuple[str, str]:
    return bearer((keys.folder / "clients" / name / "token").read_text().strip())


async def asked(port: int, path: str, *headers: tuple[str, str]) -> Answer:
    return await ask(port, path, None if ALL[path] == "GET" else {}, *headers)


def test_every_route_has_its_place_in_the_table() -> None:
    assert ALLOWED["run-a"] == ALL.keys()
    assert ALLOWED.keys() == CALLERS.keys()


async def test_each_role_reaches_what_it_is_for_and_nothing_else(keys: Keys) -> None:
    async with http_door(guarded(keys)) as (port, replicas):
        for name, role in CALLERS.items():
            answers = {path: await asked(port, path, proof(keys, name)) for path in ALL}
            assert {path for path, answer in answers.items() if answer.status == 200} == ALLOWED[name]
            for path in ALL.keys() - ALLOWED[name]:
                assert answers[path].status == 403
                route = path.replace("/rollout/", "http/Rollout/").replace("/reward/", "http/Reward/")
                assert f"{name} has the role {role}, which may not call {route}" in answers[path].message
        reached = [(path, headers["quartet-identity"]) for path, headers, _ in replicas.seen]
        assert sorted(reached) == sorted((path, name) for name in ALLOWED for path in ALLOWED[name])


START, CHAT = "/rollout/rl/start_session", "/rollout/v1/chat/completions"


async def started(port: int, replicas: Replicas, *headers: tuple[str, str]) -> tuple[str, str]:
    """Number and key of a session, as the replica that starts it is given them."""
    assert (await ask(port, START, {}, *headers)).status == 200
    _, given, _ = replicas.seen.pop()
    return given["quartet-session"], given["quartet-session-key"]


async def test_the_key_of_a_session_is_good_for_its_requests_and_no_others(keys: Keys) -> None:
    async with http_door(guarded(keys)) as (port, replicas):
        session, key = await started(port, replicas, proof(keys, "client"))
        other, _ = await started(port, replicas, proof(keys, "client"))
        assert other != session
        for path in PATHS:
            got = await asked(port, f"/rollout{path}", bearer(key), ("X-Session-ID", other))
            assert got.status == (200 if path in OF_SESSION | {"/health"} else 403), path
        for path in SCORED:
            assert (await asked(port, path, bearer(key))).status == 403
        assert len(replicas.seen) == len(OF_SESSION) + 1
        for _, headers, _ in replicas.seen:
            assert (headers["quartet-identity"], headers["quartet-role"]) == ("client", "session")
            assert headers["quartet-session"] == session
            assert "quartet-session-key" not in headers
        name, of, seal = key.removeprefix("qs~").split("~")
        forged = [f"qs~run-a~{of}~{seal}", f"qs~{name}~{other}~{seal}", f"qs~{name}~{of}~", "qs~", "qs", f"{key}a"]
        for token in forged:
            assert (await ask(port, CHAT, {}, bearer(token))).status == 401
    async with http_door(guarded(keys)) as (port, _):
        told = await ask(port, CHAT, {}, bearer(key))
        assert (told.status, "which may have been restarted" in told.message) == (401, True)


async def test_a_session_is_named_by_its_owner_and_other_servers_numbers_are_left_out(keys: Keys) -> None:
    mine = proof(keys, "client")
    async with http_door(guarded(keys)) as (port, replicas):
        session, _ = await started(port, replicas, mine)
        assert await started(port, replicas, mine, ("X-Session-ID", session)) == (session, _)
        for number, known in ((session, True), (session[:-1], False), ("rollout-17", False), (f"{session}0", False)):
            assert (await ask(port, CHAT, {}, mine, ("X-Session-ID", number))).status == 200
            _, headers, _ = replicas.seen.pop()
            assert headers.get("quartet-session") == (session if known else None)


async def test_a_key_ends_with_its_owners_rights(tmp_path: Path) -> None:
    changing = made_keys(tmp_path / "keys", {"client": "sampler", "other": "sampler"}, tokens=True)
    written = changing.policy.read_text()
    with patch.object(watched, "LOOK_EVERY_S", 0.0):
        async with http_door(guarded(changing)) as (port, replicas):
            _, key = await started(port, replicas, proof(changing, "client"))
            for change, status in (({"role": "prober"}, 403), (None, 401), ({}, 200)):
                policy = yaml.safe_load(written)
                if change is None:
                    del policy["identities"]["client"]
                else:
                    policy["identities"]["client"] |= change
                changing.policy.write_text(yaml.safe_dump(policy))
                assert (await ask(port, CHAT, {}, bearer(key))).status == status


async def test_strangers_reach_nothing(keys: Keys) -> None:
    proofs = [(), (bearer("guessed"),), (("Authorization", "Basic b3duZXI6"),), (bearer(""),)]
    async with http_door(guarded(keys)) as (port, replicas):
        for headers in proofs:
            for path in (*ALL, "/rollout/docs", "/reward/scorers/a/score", "/rollout/../critic"):
                got = await ask(port, path, None if ALL.get(path) == "GET" else {}, *headers)
                assert got.status == 401
                assert got.headers["www-authenticate"] == "Bearer"
                assert "`quartet up` writes yours to .quartet/access/token" in got.message
        assert replicas.seen == []


async def test_other_paths_methods_and_applications_are_not_served(keys: Keys) -> None:
    mine = proof(keys, "run-a")
    async with http_door(guarded(keys)) as (port, replicas):
        for path in (
            *(
                "/",
                "/rollout",
                "/rollout/",
                "/rollout/v1",
                "/rollout/v1/models/",
                "/rollout/docs",
            ),
            *("/critic/v1/models", "/reward/v1/completions", "/reward/docs", "/rollout/get_reward"),
            *("/reward/scorers/a", "/reward/scorers/a/", "/reward/scorers/a/b/c/score", "/reward/scorers/a//score"),
            *("/reward/score/scorers/a/score", "/rollout/scorers/a/v1/models"),
            *("/reward/scorers//score", "/reward/scorers/%2F/score", f"/reward/scorers/{'a' * 257}/score"),
            *("/-/routes", "/-/healthz", "/rolloutv1/models", "/v1/models"),
            *("/rollout/v1//models", "/rollout/v1/completions/../../../critic", "/rollout/%2e%2e/critic"),
        ):
            for caller in (mine, proof(keys, "client")):
                assert (await ask(port, path, None, caller)).status == 404, path
        for path, method in ALL.items():
            for other in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                if other != method:
                    got = await ask(port, path, b"{}", mine, method=other)
                    assert got.status == 405
        assert replicas.seen == []


async def test_a_scorer_may_be_named_by_the_address_which_the_replica_reads(keys: Keys) -> None:
    async with http_door(guarded(keys)) as (port, replicas):
        names = ("taste", "a.b-c_1", "two/score", "two/a.b", "function:my_reward:score", "größe/länge", "a" * 256)
        for path in (f"/reward/scorers/{name}/{below}" for name in names for below in ("score", "v1/rewards")):
            assert (await ask(port, quote(path), {}, proof(keys, "evaluator"))).status == 200
            assert (await ask(port, quote(path), {}, proof(keys, "client"))).status == 403
            assert replicas.seen.pop()[0] == path


async def test_web_pages_are_strangers_also_under_another_name() -> None:
    async with http_door(OPEN) as (port, replicas):
        wrong = ("evil.example", f"evil.example:{port}", "10.0.0.5", "", "127.0.0.1.evil.example", "[::2]")
        for host in (*wrong, "localhost:80@evil.example", "[::1", "localhost:a"):
            assert (await ask(port, COMPLETIONS, {}, host=host)).status == 403
        for origin in ("https://evil.example", "null", f"http://127.0.0.1:{port}"):
            for method in ("POST", "OPTIONS", "DELETE"):
                got = await ask(port, COMPLETIONS, {}, ("Origin", origin), method=method)
                assert got.status == 403
                assert "access-control-allow-origin" not in got.headers
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            assert (await ask(port, COMPLETIONS, b"{}", ("Content-Type", kind))).status == 415
        assert replicas.seen == []
        for host in (f"localhost:{port}", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert (await ask(port, COMPLETIONS, {}, host=host)).status == 200


async def test_the_identity_is_the_proxys_and_nothing_else_of_the_headers_goes_on(keys: Keys) -> None:
    sent = {
        **{"quartet-identity": "run-a", "quartet-role": "trainer", "Quartet-Role": "trainer", "cookie": "a=b"},
        **{"serve_multiplexed_model_id": "m", "x-session-id": "s", "x-request-id": "i\\nforged", "traceparent": "t"},
        **{"x-request-timeout-seconds": "9999", "quartet-purpose": "evaluation", "quartet-run": "mine"},
        **{"quartet-session": f"session-{'0' * 32}", "quartet-session-key": "qs~client~a~b"},
    }
    async with http_door(guarded(keys)) as (port, replicas):
        got = await ask(port, f"{COMPLETIONS}?key=secret", {"a": 1}, proof(keys, "client"), *sent.items())
        assert got.status == 200
        [(path, headers, body)] = replicas.seen
        assert (path, json.loads(body)) == (COMPLETIONS, {"a": 1})
        assert headers == {
            "content-type": "application/json",
            "quartet-purpose": "evaluation",
            "quartet-run": "mine",
            "quartet-identity": "client",
            "quartet-role": "sampler",
        }


async def test_a_caller_of_other_applications_is_refused(tmp_path: Path) -> None:
    other = made_keys(tmp_path / "keys", {"client": "sampler"}, tokens=True)
    policy = yaml.safe_load(other.policy.read_text())
    policy["identities"]["client"]["applications"] = ["second"]
    other.policy.write_text(yaml.safe_dump(policy))
    applications = {"rollout": "Rollout", "second": "Rollout"}
    async with http_door(guarded(other), applications) as (port, _):
        refused = await ask(port, "/rollout/v1/models", None, proof(other, "client"))
        assert (refused.status, refused.message) == (403, "client may not call the application 'rollout'")
        assert (await ask(port, "/second/v1/models", None, proof(other, "client"))).status == 200


LARGEST = Limits().of("/http/Rollout/v1/completions")
STRING = json.dumps("[{," * 100_000).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * DEEPEST + b"]" * DEEPEST, 200),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), 400),
        (b'{"a":' * 300_000, 400),
        (b"[" + b"0," * (MOST_ELEMENTS - 2) + b"0]", 200),
        (b"[" + b"0," * MOST_ELEMENTS + b"0]", 400),
        (b"[" + b"{}," * MOST_ELEMENTS + b"{}]", 400),
        (b'{"prompt":' + STRING + b"}", 200),
        (b'{"prompt":"' + b'\\"[' * 200_000 + b'"}', 200),
        (b'"' + b"a" * (LARGEST - 2) + b'"', 200),
        (b'"' + b"a" * LARGEST + b'"', 413),
        (b'"' + b"\\" * 1_000_000, 200),
        (b'"' + b'\\"' * 1_000_000, 200),
        (b"]" * 1_000_000, 400),
        (b'""' * MOST_STRINGS, 200),
        (b'""' * (MOST_STRINGS + 1), 400),
        (b'"\\\\"' * (MOST_STRINGS + 1), 400),
        (b'"\\\\\\""' * MOST_STRINGS, 200),
        (b"", 200),
    ],
    ids=[
        "deep",
        "deeper",
        "objects",
        "many",
        "too-many",
        "bombs",
        "text",
        "quotes",
        "large",
        "larger",
        "open",
        "open-quotes",
        "closing",
        "texts",
        "too-many-texts",
        "too-many-backslashes",
        "quotes-in-texts",
        "none",
    ],
)
async def test_bodies_are_bounded_before_they_are_parsed(body: bytes, status: int) -> None:
    async with http_door(OPEN) as (port, replicas):
        got = await ask(port, COMPLETIONS, body)
        assert got.status == status
        assert [seen for *_, seen in replicas.seen] == ([body] if status == 200 else [])


async def test_a_body_that_no_message_of_grpc_holds_goes_by_reference(tmp_path: Path) -> None:
    large = made_keys(tmp_path / "keys", {"client": "sampler"}, tokens=True, message_bytes={"completions": 8 << 20})
    async with http_door(guarded(large)) as (port, replicas):
        for size in (10, LARGEST_MESSAGE, 10):
            assert (await ask(port, COMPLETIONS, {"prompt": "a" * size}, proof(large, "client"))).status == 200
        assert replicas.by_reference == [False, True, False]
        assert replicas.under_way == 0


async def test_headers_that_decide_come_once_and_compressed_bodies_are_refused() -> None:
    async with http_door(OPEN) as (port, replicas):
        for name, value in (("Host", "127.0.0.1"), ("Content-Type", "text/plain"), ("Authorization", "Bearer a")):
            twice = [(name, value), (name, value)] if name == "Authorization" else [JSON, (name, value)]
            assert (await ask(port, COMPLETIONS, b"{}", *twice)).status == 400
        assert (await ask(port, COMPLETIONS, b"{}", JSON, ("Content-Encoding", "gzip"))).status == 415
        assert (await ask(port, COMPLETIONS, b"{}", JSON, ("X-Long", "a" * 20_000))).status == 431
        assert replicas.seen == []


async def test_a_refusal_is_read_by_a_caller_whose_body_comes_meanwhile() -> None:
    arrived, sent, read = threading.Event(), threading.Event(), http_guard._read

    def request(port: int) -> bytes:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 60000"
        with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as connection:
            connection.sendall(f"{head}\r\n\r\n".encode())
            arrived.wait(30)
            connection.sendall(b"a" * 60_000)
            sent.set()
            with connection.makefile("rb") as answer:
                return answer.read()

    def blocked(scope: Any) -> dict[str, str]:
        """Holds up the server until the body is in its socket: a connection closed with it there would be reset."""
        arrived.set()
        sent.wait(30)
        return read(scope)

    with patch("quartet.serving.door.http_guard._read", blocked):
        async with http_door(OPEN) as (port, replicas):
            answer = await asyncio.to_thread(request, port)
            assert answer.startswith(b"HTTP/1.1 415")
            assert answer.endswith(b"}")
            assert replicas.seen == []


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    slow = made_keys(tmp_path / "keys", {"client": "sampler"}, tokens=True, request_s=0.2)
    async with http_door(guarded(slow)) as (port, replicas):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        name, value = proof(slow, "client")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\n{name}: {value}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 408")
        writer.close()
        assert replicas.seen == []


async def begun(port: int, proof: tuple[str, str], body: bytes) -> asyncio.StreamWriter:
    """A request whose body goes on no further."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\n{': '.join(proof)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body) + 1}\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


async def test_bodies_that_do_not_come_hold_their_own_bytes_and_keep_no_other_request_of_their_caller_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 uploads that stood still kept all other requests of their caller waiting for half a minute."""
    limits: dict[str, Any] = {"request_s": 600, "receiving": 1, "message_bytes": {"completions": 200_000}}
    limits["unanswered_bytes"] = 800_000  # half of them the caller's
    slow = made_keys(tmp_path / "keys", {"client": "sampler"}, tokens=True, **limits)
    arrived: list[int] = []
    hold = OpenCalls.hold

    def noted(calls: OpenCalls, caller: Caller, size: int) -> Any:
        end = hold(calls, caller, size)
        arrived.append(size)
        return end

    monkeypatch.setattr(OpenCalls, "hold", noted)
    mine = proof(slow, "client")
    async with http_door(guarded(slow)) as (port, replicas), asyncio.timeout(60):
        stalled = [await begun(port, mine, b"[" + b" " * 99_999) for _ in range(3)]
        while sum(arrived) < 3 * 95_000:
            await asyncio.sleep(0.01)
        assert (await ask(port, COMPLETIONS, {}, mine)).status == 200
        refused = await ask(port, COMPLETIONS, b"[" + b" " * 150_000 + b"]", mine)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "bytes of unanswered requests" in refused.message
        for writer in stalled:
            writer.close()
        while (await ask(port, COMPLETIONS, b"[" + b" " * 150_000 + b"]", mine)).status != 200:
            await asyncio.sleep(0.01)
        assert len(replicas.seen) == 2


async def test_open_requests_have_shares(tmp_path: Path) -> None:
    limits: Any = {"concurrent_calls": 4, "caller_share": 0.5, "training_reserve": 0.25}
    few = made_keys(tmp_path / "keys", {"client": "sampler", "other": "sampler"}, tokens=True, **limits)
    released, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def later(send: Send) -> None:
        waiting.release()
        await released.wait()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": b"{}"})

    async with http_door(guarded(few)) as (port, replicas):
        replicas.answer = later
        first = [asyncio.create_task(ask(port, COMPLETIONS, {}, proof(few, "client"))) for _ in range(2)]
        for _ in range(2):
            await asyncio.wait_for(waiting.acquire(), 30)
        refused = await ask(port, COMPLETIONS, {}, proof(few, "client"))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "client has 2 open calls" in refused.message
        other = asyncio.create_task(ask(port, COMPLETIONS, {}, proof(few, "other")))
        await asyncio.wait_for(waiting.acquire(), 30)
        released.set()
        assert {(await each).status for each in (*first, other)} == {200}
        assert (await ask(port, COMPLETIONS, {}, proof(few, "client"))).status == 200


async def test_requests_and_calls_of_one_caller_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports of a process have one count, since their calls are open in one process."""
    opened: list[OpenCalls] = []
    monkeypatch.setattr(proxy, "open_port", lambda *_, calls, **__: opened.append(calls))
    monkeypatch.setattr(proxy, "_start_attended_only", lambda server: None)
    for module, name in ((default_impl, "add_grpc_address"), (http_util, "uvicorn")):
        monkeypatch.setattr(module, name, getattr(module, name))
    for name, value in OPEN.environment.items():
        monkeypatch.setenv(name, value)
    [guard] = proxy.bind_to_host()
    default_impl.add_grpc_address(None, "0.0.0.0:1")
    [calls] = opened
    assert isinstance(calls, OpenCalls)
    assert calls in guard.args


async def _trace(send: Send) -> None:
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"ray::ServeReplica /home/me/secret.py"})


async def _nothing(send: Send) -> None:
    pass


async def _raise(send: Send) -> None:
    raise RuntimeError("/home/me/secret.py")


@pytest.mark.parametrize("fault", [_trace, _nothing, _raise])
async def test_faults_of_serve_become_a_plain_answer(fault: Any) -> None:
    async with http_door(OPEN) as (port, replicas):
        replicas.answer = fault
        got = await ask(port, COMPLETIONS, {})
        assert (got.status, got.headers["retry-after"]) == (503, "1")
        assert got.message == "no replica could answer, or the one that answered has died; ask again"
        assert b"secret" not in got.body


async def test_a_request_that_no_replica_takes_is_answered_and_one_that_takes_long_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(send: Send) -> None:
        await asyncio.sleep(5 * to_replica.TAKEN_S)
        await fine(send)

    monkeypatch.setattr(to_replica, "TAKEN_S", 0.2)
    async with http_door(OPEN) as (port, replicas):
        replicas.answer = slow
        replicas.there.clear()
        for path, body in ((COMPLETIONS, {}), ("/rollout/health", None)):
            got = await asyncio.wait_for(ask(port, path, body), 60)
            assert (got.status, got.headers["retry-after"]) == (503, "1")
            assert got.message.startswith("no replica has taken the request")
        assert replicas.seen == []
        assert replicas.under_way == 0
        replicas.there.set()
        assert (await ask(port, COMPLETIONS, {})).status == 200


async def test_a_stream_that_breaks_off_ends_with_the_reason() -> None:
    async def half(send: Send) -> None:
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await send({"type": "http.response.body", "body": b'data: {"a": 1}\n\n', "more_body": True})

    async with http_door(OPEN) as (port, replicas):
        replicas.answer = half
        got = await ask(port, COMPLETIONS, {})
        first, last = [json.loads(text.removeprefix("data: ")) for text in got.body.decode().split("\n\n") if text]
        assert first == {"a": 1}
        assert last["error"]["code"] == 503


async def test_a_caller_that_leaves_is_known_to_the_replica() -> None:
    async def forever(send: Send) -> None:
        await asyncio.Event().wait()

    async with http_door(OPEN) as (port, replicas):
        replicas.answer = forever
        with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as caller:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            caller.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            while not replicas.seen:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(replicas.left.wait(), 30)


async def test_a_caller_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    """The connection is closed, and the replica learns that it has left, as if it had closed it itself."""
    unread = made_keys(tmp_path / "keys", {"client": "sampler"}, tokens=True, unread_s=0.2)

    async def without_end(send: Send) -> None:
        kind = (b"content-type", b"text/event-stream")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        while True:
            await send({"type": "http.response.body", "body": b"data: {}\n\n" * 10_000, "more_body": True})
            await asyncio.sleep(0)

    async with http_door(guarded(unread)) as (port, replicas):
        replicas.answer = without_end
        name, value = proof(unread, "client")
        with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as caller:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            caller.sendall(f"{head}{name}: {value}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            await asyncio.wait_for(replicas.left.wait(), 30)
            await asyncio.to_thread(_read_to_the_end, caller)


def _read_to_the_end(caller: socket.socket) -> None:
    """Reads what a connection had on the way when it was closed; fails if it is not."""
    with suppress(ConnectionError):
        while caller.recv(1 << 20):
            pass


async def test_other_machines_never_reach_it() -> None:
    assert HTTPOptions().host  # Serve has a default of its own, which may be every address
    with pytest.raises(ConfigError, match=r"http_options\.host: 0\.0\.0\.0; should be 127\.0\.0\.1"):
        async with http_door(OPEN, host="0.0.0.0"):
            pass
