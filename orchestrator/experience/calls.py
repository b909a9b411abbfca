"""Calls of tools in a response: the form in which a model writes them, and what they say.

They are read by transformers' `parse_response`. vLLM's parsers, which find them for clients over HTTP, take a broken
call for text, which would end the conversation where the policy is to be told; and importing them costs a run's
process 119 MB and changes its environment variables. A test compares both.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data.bounded import bounded
from orchestrator.data.rendering import EACH_S, LEAST_S, MEMORY, follow, render
from orchestrator.environments.contract import Call, Environment, Schema
from orchestrator.environments.tools import Tools
from quartet.config.base import ConfigError

_CHATML, _LLAMA = "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"
_THOUGHT = {"open": "<think>", "close": "</think>"}
FORMS: Mapping[str, dict[str, Any]] = {
    "hermes": {
        "start_anchor": _CHATML,
        "fields": {
            "content": {},
            "thinking": _THOUGHT,
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        },
    },
    "qwen3_coder": {
        "start_anchor": _CHATML,
        "fields": {
            "content": {},
            "thinking": _THOUGHT,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    # A value ends before another parameter: the ends of many without one would be sought for hours.
                    "tag_pattern": r"<parameter=(?P<key>[^<>\n]+)>\n?"
                    r"(?P<value>(?:[^<]|<(?!parameter=))*?)\n?</parameter>"
                },
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
                "repeats": True,
            },
        },
    },
    "llama3_json": {
        "start_anchor": _LLAMA,
        "fields": {
            "content": {},
            "tool_calls": {
                "open_pattern": r'^(?:<\|python_tag\|>)?\s*(?=\{\s*"name")',
                "close_pattern": r"<\|eo[tm]_id\|>",
                "content": "json",
                "repeats": True,
            },
        },
    },
}
"""Response templates by the names of vLLM's parsers of these forms: of Qwen 2.5 and 3, Qwen 3 Coder and 3.5, Llama 3.
"""
UNREADABLE = Call("", {}, "the call cannot be read: it should be complete, with a name and an object of arguments")
_DEEPEST = 32
"""Most levels of lists and objects in the arguments of a call."""
_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
_PROBE: Schema = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a text.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "the text"},
                "count": {"type": "integer", "description": "the number"},
            },
            "required": ["text", "count"],
        },
    },
}
_PROBED = {"name": "find", "arguments": {"text": "a b", "count": 3}}
_ANSWER = {"role": "tool", "name": "find", "content": "a b"}


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which a model writes calls."""

    tokenizer: Any
    tools: Sequence[Schema]
    template: Mapping[str, Any]
    """For transformers' `parse_response`."""
    prefix: str
    """Text that the chat template writes before a response, such as the beginning of a thought."""

    def read(self, texts: Sequence[str]) -> list[tuple[Call, ...]]:
        """The calls in each response, whose text has its special tokens. One that cannot be read makes all of its
        response UNREADABLE.

        Raises:
            ConfigError: reading took too long, or too much memory.
        """

        def work() -> Iterator[list[list[Any]]]:
            for text in texts:
                yield [[call.name, call.arguments, call.problem] for call in self._read(text)]

        size = sum(map(len, texts))
        seconds = LEAST_S + EACH_S * len(texts)
        found = bounded(work, "calls of tools", memory=MEMORY + 8 * size, seconds=seconds)
        return [tuple(Call(*call) for call in calls) for calls in found]

    def _read(self, text: str) -> list[Call]:
        try:
            message = self.tokenizer.parse_response(
                text, dict(self.template), prefix=self.prefix, tools=list(self.tools)
            )
            calls = [_call(each.get("function", each)) for each in message.get("tool_calls", ())]
            return [UNREADABLE] if UNREADABLE in calls else calls
        except MemoryError:
            raise
        except Exception:  # what a policy wrote, read by rules that may be of a model's folder
            return [UNREADABLE]


def form_of(environment: Environment | None, chat_template: bool, tokenizer: Any) -> Form | None:
    """The form in which a tokenizer's chat template writes calls; None without tools.

    Args:
        environment: whose tools they are.
        chat_template: whether prompts are rendered by the chat template.
        tokenizer: the policy's.

    Raises:
        ConfigError: prompts are plain text, or the template writes no tools, or none of their answers, or calls in a
            form that is not known.
    """
    if environment is None or not environment.tools:
        return None
    if not chat_template:
        raise ConfigError(
            f"orchestrator.data.chat_template: false, but {environment.name} has tools, which a chat template writes "
            "into the prompts; set it to true, with a model whose template takes tools"
        )
    where = f"the chat template of {tokenizer.name_or_path}"
    if isinstance(environment, Tools):  # whose answers are such messages
        [answered] = follow([[_ANSWER]], tokenizer, [f"{where}, given the answer of a tool"], [_PROBE])
        if _ANSWER["content"] not in answered:
            raise ConfigError(
                f"orchestrator.environment.kind: {environment.name} has tools, but {where} leaves out their answers"
                "; should be a model whose template writes messages of role 'tool'"
            )
    call = {"id": "call00001", "type": "function", "function": _PROBED}
    called = [*_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    [bare] = render([_QUESTION], tokenizer, [where])
    begun, asked, whole = render(
        [_QUESTION, _QUESTION, called], tokenizer, [where] * 3, generating=[True, False, False], tools=[_PROBE]
    )
    if bare == begun:
        raise ConfigError(
            f"orchestrator.environment.kind: {environment.name} has tools, but {where} writes none into a prompt; "
            "should be a model whose template does"
        )
    prefix = begun.removeprefix(asked) if begun.startswith(asked) else ""
    # A template may write what is past without the beginning of a thought that it writes before a response.
    past = (begun, prefix) if whole.startswith(begun) else (asked, "")
    written = whole.removeprefix(past[0])
    own = getattr(tokenizer, "response_template", None)
    for template in [*([own] if own else ()), *FORMS.values()]:
        if Form(tokenizer, [_PROBE], template, past[1]).read([written]) == [(_call(_PROBED),)]:
            return Form(tokenizer, environment.tools, template, prefix)
    raise ConfigError(
        f"orchestrator.environment.kind: {environment.name} has tools, but {where} writes a call as "
        f"{written[:200]!r}, which is not {' or '.join(FORMS)}; its tokenizer_config.json should have a "
        "response_template that reads it, as transformers' parse_response takes one"
    )


def _call(function: Any) -> Call:
    """The call that a function's name and arguments are; UNREADABLE if they are none, or what JSON cannot hold."""
    name, arguments = function["name"], function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict) or _is_deep(arguments):
        return UNREADABLE
    json.dumps([name, arguments], ensure_ascii=False).encode()  # halves of characters are a ValueError
    return Call(name, arguments)


def _is_deep(value: Any, levels: int = _DEEPEST) -> bool:
    """True if there are so many levels of values in a value, or more."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(each, levels - 1) for each in inner)
