"""Calls in a response, by published chat templates: found, or told to be broken, and never trusted."""

import json
from typing import Any

import pytest

from examples.calculator import Calculator
from examples.second_try import SecondTry
from orchestrator.environments.contract import Call
from orchestrator.experience import calls as module
from orchestrator.experience.calls import FORMS, UNREADABLE, Form, form_of
from quartet.config.base import ConfigError
from tests.chat import LLAMA, QWEN, QWEN_CODER, make_bytes

TEMPLATES = {"hermes": QWEN, "qwen3_coder": QWEN_CODER, "llama3_json": LLAMA}
MULTIPLY = Call("multiply", {"a": 6, "b": 7})
SAID = {
    "hermes": 'Let us see.\n<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>',
    "qwen3_coder": "so</think>\n<tool_call>\n<function=multiply>\n<parameter=a>\n6\n</parameter>\n<parameter=b>\n7\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "multiply", "parameters": {"a": 6, "b": 7}}',
}


def form(name: str) -> Form:
    tokenizer = make_bytes()
    tokenizer.chat_template = TEMPLATES[name]
    found = form_of(Calculator(), True, tokenizer)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=FORMS)
def named(request: pytest.FixtureRequest) -> tuple[str, Form]:
    return request.param, form(request.param)


def test_the_form_is_that_in_which_the_template_writes_calls(named: tuple[str, Form]) -> None:
    name, found = named
    assert found.template is FORMS[name]
    assert found.tools == Calculator().tools


def test_calls_are_found_and_texts_without_any_are_not_calls(named: tuple[str, Form]) -> None:
    name, found = named
    # Of the first, only the end is missing.
    texts = [SAID[name], "The answer is 42.", "", '{"answer": 42}', "6 < 7", SAID[name].removesuffix("</tool_call>")]
    assert found.read(texts) == [(MULTIPLY,), (), (), (), (), (MULTIPLY,)]


def test_several_calls_keep_their_order() -> None:
    one, other = '{"name": "multiply", "arguments": {"a": 6, "b": 7}}', '{"name": "divide", "arguments": {}}'
    text = f"<tool_call>{other}</tool_call> and\n<tool_call>\n{one}\n</tool_call><tool_call>{other}</tool_call>"
    assert form("hermes").read([text]) == [(Call("divide", {}), MULTIPLY, Call("divide", {}))]


def test_a_call_that_is_only_thought_of_is_none() -> None:
    assert form("hermes").read([f"<think>{SAID['hermes']}</think>no"]) == [()]
    # The template has begun the thought.
    coder = SAID["qwen3_coder"].removeprefix("so</think>")
    assert form("qwen3_coder").read([coder, f"{coder}</think>no", f"</think>{coder}"]) == [(), (), (MULTIPLY,)]


@pytest.mark.parametrize(
    "inside",
    [
        *(
            "",
            "{",
            '{"name": "multiply"',
            '{"name": "multiply"}',
            "[]",
            "[1]",
            "7",
            "null",
            '"multiply"',
            "{}",
            "NaN",
        ),
        '{"name": "multiply", "arguments": {"a": 6, "b": 7}} {}',
        '{"name": "multiply", "arguments": [6, 7]}',
        '{"name": "multiply", "arguments": "{}"}',
        '{"name": ["multiply"], "arguments": {}}',
        '{"name": {}, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"function": 1}',
        '{"arguments": {}}',
        '{"name": "multiply", "arguments": {"a": "\\ud800"}}',
        '{"name": "multiply", "arguments": {"\\udfff": 1}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "multiply", "arguments": {"a": ' + "9" * 5000 + "}}",
        "[" * 100_000,
        '{"name": "multiply", "arguments": {"a": ' + "[" * 33 + "]" * 33 + "}}",
        '{"name": "multiply", "arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5000 + "}",
    ],
)
def test_a_call_that_cannot_be_read_is_told_and_takes_no_other_response_with_it(inside: str) -> None:
    texts = [SAID["hermes"], f"<tool_call>{inside}</tool_call>", SAID["hermes"] + "<tool_call>{", "no"]
    assert form("hermes").read(texts) == [(MULTIPLY,), (UNREADABLE,), (UNREADABLE,), ()]


def test_large_and_repeated_calls_are_read() -> None:
    # Of a length that 32,768 tokens may have.
    for text, most in (("<tool_call>" * 12_000, 1), (SAID["hermes"] * 1200, 1200), ("<" * 130_000, 0)):
        [found] = form("hermes").read([text])
        assert len(found) == most
    large = json.dumps({"name": "multiply", "arguments": {"a": "x" * 10**6, "b": [[0] * 1000] * 10}})
    [[call]] = form("hermes").read([f"<tool_call>{large}"])
    assert len(call.arguments["a"]) == 10**6


@pytest.mark.parametrize("end", ["", "</function>\n</tool_call>"])
def test_parameters_without_an_end_are_passed_over(end: str) -> None:
    # Seeking the end of each took hours, and a run ends after a minute of it.
    unended = "<tool_call>\n<function=multiply>\n" + "<parameter=a>\n6" * 100_000
    closed = "\n</think>" + SAID["qwen3_coder"].removeprefix("so</think>")
    [[call], both] = form("qwen3_coder").read([f"</think>{unended}{end}", closed])
    assert call == Call("multiply", {})
    assert both == (MULTIPLY,)


def test_reading_that_takes_too_long_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's own expression may take as long as it likes."""
    monkeypatch.setattr(module, "LEAST_S", 0.2)
    fields = {"tool_calls": {"open": "x", "close_pattern": "(a|a|aa)+$", "content": "json"}}
    own = Form(make_bytes(), [], {"start_anchor": "y", "fields": fields}, "")
    with pytest.raises(ConfigError, match="calls of tools"):
        own.read(["x" + "a" * 100 + "b"])


def test_a_tokenizers_own_response_template_is_taken() -> None:
    tokenizer = make_bytes()
    tokenizer.chat_template = QWEN.replace("tool_call>", "call>")
    with pytest.raises(ConfigError, match=r"writes a call as '.*, which is not hermes or qwen3_coder or llama3"):
        form_of(Calculator(), True, tokenizer)
    calls = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": {"tool_calls": calls}}
    found = form_of(Calculator(), True, tokenizer)
    assert found is not None
    assert found.read([SAID["hermes"].replace("tool_call>", "call>"), SAID["hermes"]]) == [(MULTIPLY,), ()]
    tokenizer.response_template["fields"]["tool_calls"]["open"] = "<calls>"
    with pytest.raises(ConfigError, match="should have a response_template that reads it"):
        form_of(Calculator(), True, tokenizer)


def test_what_writes_no_tools_is_refused() -> None:
    tokenizer = make_bytes()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"^orchestrator\.environment\.kind: .*Calculator has tools, but .* none"):
        form_of(Calculator(), True, tokenizer)
    with pytest.raises(ConfigError, match=r"^orchestrator\.data\.chat_template: false, but .*Calculator has tools"):
        form_of(Calculator(), False, tokenizer)
    assert form_of(SecondTry(), False, tokenizer) is None
    assert form_of(None, False, tokenizer) is None


def beside(name: str, parser: Any, texts: list[str]) -> None:
    request: Any = type("Request", (), {"tools": None, "tool_choice": "auto"})()
    for text, ours in zip(texts, form(name).read(texts), strict=True):
        theirs = parser.extract_tool_calls(text, request)
        calls = [(each.function.name, json.loads(each.function.arguments)) for each in theirs.tool_calls]
        assert calls == [(call.name, call.arguments) for call in ours]
        assert theirs.tools_called is bool(ours)


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_vllms_parser_of_that_name_finds_the_same(name: str) -> None:
    """A model's calls are the same in a run and at the rollout's door. For broken ones vLLM finds no calls."""
    from vllm.tool_parsers import ToolParserManager

    texts = [SAID[name], "The answer is 42.", ""]
    if name == "hermes":
        texts += [SAID[name] * 2, SAID[name].removesuffix("</tool_call>"), f"a {SAID[name]} b"]
    beside(name, ToolParserManager.get_tool_parser(name)(make_bytes()), texts)


def test_vllms_parser_of_xml_finds_the_same() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    tools = [ChatCompletionToolsParam.model_validate(each) for each in Calculator().tools]
    tokenizer = make_bytes()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    parser = ToolParserManager.get_tool_parser("qwen3_coder")(tokenizer, tools)
    beside("qwen3_coder", parser, [SAID["qwen3_coder"], "so</think>42"])
