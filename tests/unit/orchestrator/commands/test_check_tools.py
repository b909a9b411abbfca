"""`quartet check` of runs whose policy may call tools."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from tests.unit.preflights import args, checked, problems

KIND = "orchestrator.environment.kind: examples.calculator:Calculator"
WRITING = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
CALLING = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call> {% endfor %}"


def template(writing: str = WRITING, calling: str = CALLING) -> str:
    return f"{writing}{{% for m in messages %}}{{{{ m.content }}}} {calling}{{% endfor %}}"


@pytest.fixture
def tools(raw: dict[str, Any], policy_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """The file of a run with tools, whose policy is at `tmp_path / "policy"`."""
    policy = copytree(policy_folder, tmp_path / "policy")
    (policy / "chat_template.jinja").write_text(template())
    raw["orchestrator"]["policy"]["model"] = args(raw, "rollout")["model"] = str(policy)
    raw["orchestrator"]["data"]["chat_template"] = True
    raw["orchestrator"]["sampling"]["max_new_tokens"] = 8
    raw["orchestrator"]["environment"] = {"kind": "examples.calculator:Calculator"}
    return raw


def test_prompts_hold_the_tools(tools: dict[str, Any], tmp_path: Path) -> None:
    inputs = checked(tools, tmp_path)
    assert inputs.train.prompts[0].text == "multiply divide w4 "
    assert inputs.held_out is not None
    assert inputs.held_out.prompts[0].text == "multiply divide w30 "
    said = CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")])
    assert said.output.rstrip().endswith("a.yaml: fine")


def test_prompts_that_are_plain_text_are_refused(tools: dict[str, Any], tmp_path: Path) -> None:
    tools["orchestrator"]["data"]["chat_template"] = False
    [line] = problems(tools, tmp_path)
    assert line.startswith("orchestrator.data.chat_template: false, but examples.calculator:Calculator has tools")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (template(writing=""), f"{KIND} has tools, but the chat template of {{policy}} writes none into a prompt"),
        (
            template(calling=""),
            f"{KIND} has tools, but the chat template of {{policy}} writes a call as ' ', which is",
        ),
        (
            template().replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"),
            f"{KIND} has tools, but the chat template of {{policy}} leaves out their answers",
        ),
        (
            template(calling="{{ m.tool_calls }}"),
            f"{KIND} has tools, but the chat template of {{policy}} writes a call",
        ),
    ],
)
def test_a_template_that_cannot_say_it_is_refused(
    tools: dict[str, Any], tmp_path: Path, written: str, said: str
) -> None:
    (tmp_path / "policy" / "chat_template.jinja").write_text(written)
    [line] = problems(tools, tmp_path)
    assert line.startswith(said.format(policy=tmp_path / "policy"))


def test_a_template_that_refuses_the_answers_of_tools_is_told(tools: dict[str, Any], tmp_path: Path) -> None:
    refusing = "{% if messages[-1].role == 'tool' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    (tmp_path / "policy" / "chat_template.jinja").write_text(template() + refusing)
    [line] = problems(tools, tmp_path)
    assert line.startswith(
        f"data.chat_template: the chat template of {tmp_path / 'policy'}, given the answer of a tool"
    )
    assert line.endswith("roles must alternate")


def test_a_method_that_cannot_be_described_is_named(
    tools: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools_of_a_user.py").write_text(
        "from orchestrator.environments.tools import Tools\n\n\n"
        "class Mine(Tools):\n"
        "    def look(self, where):\n"
        "        '''Looks.'''\n"
        "        return where\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tools["orchestrator"]["environment"]["kind"] = "tools_of_a_user:Mine"
    [line] = problems(tools, tmp_path)
    field = "orchestrator.environment.kind"
    assert line.startswith(f"{field}: tools_of_a_user:Mine.look: Argument where is missing a type hint")
