"""`quartet chat`: what it sends, what it shows, and what it says when none comes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.chat import Chat
from orchestrator.deployment.listeners import free_ports
from quartet.config.base import ConfigError
from quartet.security.credentials import VARIABLE, token_for
from quartet.security.keys.folder import Keys
from quartet.security.port import Port
from quartet.wire.errors import Unavailable
from tests.gpu_requests import load
from tests.unit.http_door import Send, http_door

SHIPPED = Path(__file__).parents[4] / "deploy" / "ppo.yaml"
OPEN = Port(local="open", http=True)


def events(*contents: Any) -> Any:
    async def stream(send: Send) -> None:
        kind = (b"content-type", b"text/event-stream")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        for content in contents:
            text = content if content == "[DONE]" else json.dumps(content)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return stream


def piece(version: int, **delta: Any) -> Any:
    return {"policy_version": version, "choices": [{"delta": delta}]}


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}/rollout/v1"


async def test_a_conversation_is_sent_whole_and_shown_piece_by_piece() -> None:
    async with http_door(OPEN) as (port, replicas):
        replicas.answer = events(
            piece(3, role="assistant", content=""), piece(3, content="w5 "), piece(4, content="w6"), "[DONE]"
        )
        chat, shown = Chat(address(port), None, temperature=0.5), list[str]()
        assert await asyncio.to_thread(chat.say, "w9", shown.append) == 4
        assert "".join(shown) == "w5 w6"
        assert await asyncio.to_thread(chat.say, "w8", shown.append) == 4
        said = [json.loads(body) for *_, body in replicas.seen]
        first, answer = {"role": "user", "content": "w9"}, {"role": "assistant", "content": "w5 w6"}
        assert said == [
            {"messages": [first], "stream": True, "temperature": 0.5},
            {"messages": [first, answer, {"role": "user", "content": "w8"}], "stream": True, "temperature": 0.5},
        ]
        assert {path for path, *_ in replicas.seen} == {"/rollout/v1/chat/completions"}


async def test_what_failed_is_not_part_of_the_conversation() -> None:
    async with http_door(OPEN) as (port, replicas):
        chat = Chat(address(port), None)
        replicas.answer = events(piece(3, content="w5"), {"error": {"message": "the replica died"}})
        with pytest.raises(Unavailable, match="the replica died"):
            await asyncio.to_thread(chat.say, "w9", lambda _: None)
        replicas.answer = events(piece(3, content="w5"), "[DONE]")
        await asyncio.to_thread(chat.say, "w8", lambda _: None)
        assert json.loads(replicas.seen[-1][2])["messages"] == [{"role": "user", "content": "w8"}]


async def test_refusals_and_silence_are_told_in_words(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", days=1)
    keys.make(["127.0.0.1"], {"me": "sampler"}, tokens=True)
    token = token_for("127.0.0.1:1", {VARIABLE: str(keys.folder / "clients" / "me")})
    async with http_door(Port(policy=keys.policy, http=True)) as (port, replicas):
        replicas.answer = events(piece(3, content="w5"), "[DONE]")
        assert await asyncio.to_thread(Chat(address(port), token).say, "w9", lambda _: None) == 3
        with pytest.raises(ConfigError, match="bearer token"):
            await asyncio.to_thread(Chat(address(port), None).say, "w9", lambda _: None)
    [closed] = free_ports(1)
    with pytest.raises(Unavailable, match="is `quartet up` done"):
        Chat(address(closed), token).say("w9", lambda _: None)


def test_a_file_whose_http_port_is_closed_says_how_to_open_it(tmp_path: Path) -> None:
    deployment = load(SHIPPED, tmp_path)
    with pytest.raises(ConfigError, match=r"security\.http: should be true"):
        Chat.of(deployment)
    assert Chat.of(replace(deployment, port=OPEN))._address == "http://127.0.0.1:18000/rollout/v1"


def test_the_command_shows_hostile_text_written_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    class Talks:
        def say(self, text: str, show: Any) -> int:
            said.append(text)
            show("w5 \x1b[2J[red]")
            return 7

    given: dict[str, Any] = {}
    monkeypatch.setattr(Chat, "of", lambda deployment, **sampling: given.update(sampling) or Talks())
    path = load(SHIPPED, tmp_path).path
    done = CliRunner().invoke(app, ["chat", str(path), "--max-tokens", "5"], input="w9\n\n w8 \n")
    assert done.exit_code == 0, done.output
    assert (said, given) == (["w9", "w8"], {"temperature": 1.0, "max_completion_tokens": 5})
    assert done.output.count("w5 \\x1b[2J[red]  (version 7)\n") == 2
