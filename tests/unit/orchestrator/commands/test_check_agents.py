"""`quartet check` of runs whose conversations an agent has."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.checks import agents as module
from orchestrator.commands.checks.agents import await_door, door_of_agents
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from services.rollout.session_client import SessionClient
from services.rollout.sessions import MOST_SESSIONS
from tests.unit.preflights import checked, problems

KIND = "orchestrator.agent.kind:"
AGENT = {"kind": "examples.agent:solve", "max_tokens": 40}


@pytest.fixture
def agents(raw: dict[str, Any]) -> dict[str, Any]:
    raw["orchestrator"] |= {"agent": AGENT, "sampling": {"max_new_tokens": 8}}
    raw["security"] = {"http": True}
    return raw


def test_the_agent_is_imported_and_the_door_is_that_of_the_rollout_application(
    agents: dict[str, Any], tmp_path: Path
) -> None:
    agents["http_options"]["port"] = 18123
    inputs = checked(agents, tmp_path)
    assert inputs.agent is not None
    assert inputs.agent.name == "examples.agent:solve"
    assert door_of_agents(Deployment.load(tmp_path / "a.yaml")) == "http://127.0.0.1:18123/rollout"


async def test_a_door_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_S", 0.3)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/rollout"
    async with SessionClient(address, "token", 5) as sessions:
        async with server:
            await await_door(sessions)
        with pytest.raises(ConfigError, match=rf"security.http: the port of {address} is closed"):
            await await_door(sessions)


def test_a_closed_door_is_named(agents: dict[str, Any], tmp_path: Path) -> None:
    del agents["security"]
    [line] = problems(agents, tmp_path)
    assert line.startswith("security.http: should be true, as the agent speaks OpenAI's protocol")


def test_a_rollout_service_of_another_file_has_no_known_door(agents: dict[str, Any], tmp_path: Path) -> None:
    agents["orchestrator"]["services"] = {"rollout": {"application": "elsewhere", "target": "127.0.0.1:19500"}}
    said = problems(agents, tmp_path)
    assert any(
        line.startswith("orchestrator.services.rollout: elsewhere is not deployed by this file") for line in said
    )


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_model_that_takes_no_messages_is_remarked_on(
    agents: dict[str, Any], tmp_path: Path, policy_folder: Path, template: str
) -> None:
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    agents["orchestrator"]["policy"]["model"] = str(folder)
    remarks = [each for each in checked(agents, tmp_path).remarks if "has no chat template" in each]
    assert len(remarks) == (not template)


def test_no_more_conversations_go_on_than_an_owner_has_sessions(agents: dict[str, Any], tmp_path: Path) -> None:
    agents["orchestrator"]["agent"] = AGENT | {"at_once": MOST_SESSIONS // 2}
    [line] = problems(agents, tmp_path)
    assert line.startswith("orchestrator.agent.at_once: should be 1024 or less")


def test_messages_of_the_data_come_by_a_column(agents: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "w7"}], "label": "w7"}]
    (tmp_path / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "messages.jsonl"), "input_key": "label", "columns": ["prompt"]}
    agents["orchestrator"] |= {"data": data | {"max_prompt_length": 16}, "evaluation": {"every": 0}}
    [prompt] = checked(agents, tmp_path).train.prompts
    assert (prompt.text, prompt.columns) == ("w7", {"prompt": rows[0]["prompt"]})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nowhere:solve", f"{KIND} 'nowhere:solve' should be package.module:name"),
        (
            "tests.agents:HOLD",
            f"{KIND} 'tests.agents:HOLD' should be a function of one argument, a Task",
        ),
        ("tests.cluster:engine_of", None),
        ("tests.runs:assert_same", f"{KIND} 'tests.runs:assert_same' should be a function of one"),
    ],
)
def test_what_is_no_agent_is_named(agents: dict[str, Any], tmp_path: Path, kind: str, said: str | None) -> None:
    agents["orchestrator"]["agent"] = {"kind": kind, "max_tokens": 40}
    if said is None:
        assert checked(agents, tmp_path).agent is not None
        return
    [line] = problems(agents, tmp_path)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"environment": {"kind": "examples.second_try:SecondTry"}},
            "agent: given, and environment too",
        ),
        ({"agent": AGENT | {"max_tokens": 7}}, r"agent.max_tokens (7) must be at least"),
        ({"sampling": {"max_new_tokens": 8, "min_new_tokens": 2}}, "sampling: min_new_tokens"),
        (
            {"sampling": {"max_new_tokens": 8, "stop_token_ids": [5]}},
            "sampling: min_new_tokens and stop",
        ),
        (
            {"data": {"path": "prompts.jsonl", "chat_template": True}},
            "data.chat_template: true, but an",
        ),
        ({"data": {"path": "prompts.jsonl", "columns": ["result"]}}, "data.columns: result is that of"),
        (
            {"algorithm": {"kind": "dapo", "overlong_buffer": 4, "minibatch_size": 8, "samples_per_prompt": 2}},
            "algorithm.overlong_buffer: is for single responses",
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    agents: dict[str, Any], tmp_path: Path, section: dict[str, Any], said: str
) -> None:
    agents["orchestrator"] |= section
    assert any(line.startswith(f"orchestrator: {said}") for line in problems(agents, tmp_path)), problems(
        agents, tmp_path
    )
