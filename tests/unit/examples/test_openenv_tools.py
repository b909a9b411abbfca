"""The agent for environments of OpenEnv, with a model whose answers are given: beside a server that answers as that
of version 0.10 does, and beside that itself."""

import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from examples.openenv_tools import play
from orchestrator.deployment.listeners import free_ports
from orchestrator.environments.agent import Task
from tests.installed import installed
from tests.unit.openai_endpoint import Asked, Reply, serving

SERVER = Path(__file__).parents[2] / "openenv_server.py"
STARTS_S = 60
SESSIONS = 4
"""Most sessions of that server."""
SCHEMA = {
    **{"additionalProperties": False, "required": ["a", "b"], "type": "object"},
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}


async def as_openenv(session: ServerConnection) -> None:
    """Answers as tests/openenv_server.py, by the messages that were recorded of it."""
    if len(session.server.connections) > SESSIONS:
        reason = {"message": "Server at capacity: 4/4 sessions active", "code": "CAPACITY_REACHED"}
        await session.send(json.dumps({"type": "error", "data": reason}))
        return
    wanted = 0
    async for message in session:
        asked = json.loads(message)
        data = asked["data"]
        answer: dict[str, Any] = {"observation": {}, "reward": 0.0, "done": False}
        if asked["type"] == "reset":
            wanted = data["wanted"]
        elif data["type"] == "list_tools":
            tool = {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}
            answer |= {"observation": {"tools": [tool]}, "reward": None}
        else:
            right, told = False, {"tool_name": data["tool_name"], "result": None, "error": None}
            if data["tool_name"] != "add":
                told["error"] = {
                    "error_type": "tool_not_found",
                    "message": f"Unknown tool: '{data['tool_name']}'",
                }
            else:
                total = data["arguments"]["a"] + data["arguments"]["b"]
                right = total == wanted
                content = [{"type": "text", "text": str(total), "annotations": None, "meta": None}]
                told["result"] = {"content": content, "data": total, "is_error": False}
            answer = {"observation": told, "reward": 1.0 if right else -0.25, "done": right}
        await session.send(json.dumps({"type": "observation", "data": answer}))


@asynccontextmanager
async def recorded(folder: Path) -> AsyncIterator[str]:
    async with serve(as_openenv, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[str]:
    [port] = free_ports(1)
    python = installed(folder / "environment", ["openenv==0.10.0"])
    server = subprocess.Popen([str(python), str(SERVER), str(port)])
    try:
        until = time.monotonic() + STARTS_S
        while True:
            try:
                async with connect(f"ws://127.0.0.1:{port}/ws"):
                    break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < until
        yield f"ws://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=[recorded, pytest.param(real, marks=pytest.mark.exhaustive)], scope="module")
async def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with request.param(tmp_path_factory.mktemp("openenv")) as address:
        yield address


@asynccontextmanager
async def held(address: str) -> AsyncIterator[None]:
    """A session, as soon as those of tests before have made room for it."""
    while True:
        async with connect(f"{address}/ws") as session:
            await session.send(json.dumps({"type": "step", "data": {"type": "list_tools"}}))
            if json.loads(await session.recv())["type"] == "observation":
                yield
                return


def task(base_url: str, **columns: Any) -> Task:
    return Task(base_url, "key", "mine", sample=4, row=2, prompt="Reach 7.", label="", columns=columns, seed=3)


def calls(*made: tuple[str, str]) -> Reply:
    """An answer of the model that calls tools."""
    listed = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(made)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": listed}
    return Reply({"id": "1", "object": "chat.completion", "created": 0, "model": "mine"} | _choice(message))


def said(text: str) -> Reply:
    return Reply(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "mine"}
        | _choice({"role": "assistant", "content": text})
    )


def _choice(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def in_turn(*replies: Reply) -> Callable[[Asked], Reply]:
    left = list(replies)
    return lambda asked: left.pop(0)


async def test_calls_are_made_and_rewards_added_until_the_environment_is_done(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_URL", address)
    answers = in_turn(
        calls(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 2, "b": 2}')),
        calls(("subtract", "{}"), ("add", "[1]"), ("add", '{"a": 1,'), ("add", '{"a":' * 100_000)),
        calls(("add", '{"a": 3, "b": 4}'), ("add", '{"a": 3, "b": 5}')),
    )
    with serving(answers) as (base_url, asked):
        # Two sums and an unknown tool; what is no object never comes to the environment, nor calls after its end.
        assert await play(task(base_url, reset={"wanted": 7})) == 3 * -0.25 + 1.0
    first, second, third = (request.body for request in asked)
    assert first["messages"] == [{"role": "user", "content": "Reach 7."}]
    assert [each["function"]["name"] for each in first["tools"]] == ["add"]
    assert first["tools"][0]["function"]["parameters"] == SCHEMA
    assert asked[0].key == "Bearer key"
    for before, after in ((first, second), (second, third)):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    answered = [(each["tool_call_id"], each["content"]) for each in third["messages"] if each["role"] == "tool"]
    wrong = "error: the arguments are no JSON object"
    assert answered == [
        *[("c0", "3"), ("c1", "4")],
        *[("c0", "error: Unknown tool: 'subtract'"), ("c1", wrong), ("c2", wrong), ("c3", wrong)],
    ]


async def test_an_answer_without_a_call_ends_the_conversation(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", address)
    with serving(in_turn(said("I do not know."))) as (base_url, asked):
        assert await play(task(base_url, reset={"wanted": 7})) == 0.0
    assert len(asked) == 1


async def test_a_full_environment_is_a_failure_and_no_reward(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", address)
    async with AsyncExitStack() as others:
        for _ in range(SESSIONS):
            await others.enter_async_context(held(address))
        full = pytest.raises(RuntimeError, match=r"refused reset: .*CAPACITY_REACHED")
        with serving(in_turn()) as (base_url, asked), full:
            await play(task(base_url, reset={"wanted": 7}))
        assert not asked
