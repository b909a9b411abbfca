"""Histories of messages: what counts as the same, and what a stream adds up to."""

import tracemalloc
from typing import Any

import pytest

from quartet.wire.json_bounds import DEEPEST
from services.rollout.histories import Told, answered, carried, digests

USER: dict[str, Any] = {"role": "user", "content": "w5"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1, "b": 2}'}}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "w6", "reasoning": "w7", "tool_calls": [CALL]}


def of(*messages: Any, **more: Any) -> list[bytes]:
    return digests({"messages": list(messages)} | more)


def test_a_history_is_known_by_each_of_its_beginnings() -> None:
    one, two = of(USER), of(USER, ANSWER)
    assert two[0] == one[0]
    assert answered(one[-1], ANSWER) == two[1]
    assert digests({}) == []


@pytest.mark.parametrize(
    "same",
    [
        {"reasoning": None},
        {"content": [{"type": "text", "text": "w"}, {"type": "text", "text": "6"}]},
        {"tool_calls": [CALL | {"id": "another", "function": {"name": "look", "arguments": '{"b":2,"a":1}'}}]},
        {"prompt_token_ids": [1], "generation_token_ids": [2]},
    ],
)
def test_what_a_client_may_write_otherwise_does_not_count(same: dict[str, Any]) -> None:
    assert of(USER, ANSWER | same) == of(USER, ANSWER)


@pytest.mark.parametrize(
    "other",
    [
        {"content": "w6 "},
        {"content": None},
        {"role": "user"},
        {"name": "n"},
        {"tool_calls": []},
        {"tool_calls": [CALL, CALL]},
        {"tool_calls": [CALL | {"function": {"name": "look", "arguments": "{"}}]},
    ],
)
def test_what_the_template_would_write_otherwise_counts(other: dict[str, Any]) -> None:
    assert of(USER, ANSWER | other)[1] != of(USER, ANSWER)[1]
    assert of(USER, tools=[1]) != of(USER) != of(USER, chat_template_kwargs={"a": 1})
    assert of(USER, tools=[{"a": 1, "b": 2}]) == of(USER, tools=[{"b": 2, "a": 1}])


def test_arguments_with_many_or_deep_parts_are_taken_as_they_are_written() -> None:
    """No depth is an error; what is deeper than a request may have counts as an empty object."""

    def call(arguments: str) -> dict[str, Any]:
        return ANSWER | {"tool_calls": [CALL | {"function": {"name": "look", "arguments": arguments}}]}

    deep = [call('{"a": ' + "[" * depth + "]" * depth + "}") for depth in range(1, 900)]
    assert len({of(USER, each)[1] for each in deep}) == DEEPEST
    assert of(USER, call('{"a": NaN}')) == of(USER, call("{}"))
    assert of(USER, call('{"a": 1.0}')) == of(USER, call('{"a": 1}')) != of(USER, call('{"a": 1.5}'))
    many = '{"a": [' + "[], " * 300_000 + "[]]}"
    tracemalloc.start()
    of(USER, call(many))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * len(many)
    assert of(USER, call('{"a": [1]}')) == of(USER, call('{"a":[1]}'))
    # No object: clients get or make an empty one in its place.
    assert of(USER, call("{")) == of(USER, call("[1]")) == of(USER, call("[" * 1200 + "]" * 1200))
    assert of(USER, call("[1]")) == of(USER, call("{}")) != of(USER, call('{"a": 1}'))


def test_a_stream_adds_up_to_the_message() -> None:
    told = Told()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "w7"},
        {"content": "w"},
        {"content": "6"},
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "look"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1,'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "find", "arguments": "{}"}}]},
        {"tool_calls": [{"function": {"arguments": ' "b": 2}'}}]},
        {"tool_calls": [{"index": 0, "function": None}]},
        {},
    ):
        told.add(delta)
    other = {"function": {"name": "find", "arguments": "{}"}}
    assert of(USER, told.message) == of(USER, ANSWER | {"tool_calls": [CALL, other]})


def test_messages_bring_the_tokens_of_the_last_that_has_some() -> None:
    first = ANSWER | {"prompt_token_ids": [5, 6], "generation_token_ids": [7]}
    last = ANSWER | {"prompt_token_ids": [5, 6, 7, 8], "generation_token_ids": [9]}
    begun = carried([USER, first, USER, last, USER])
    assert (begun.ids.tolist(), str(begun.ids.dtype), begun.messages) == ([5, 6, 7, 8, 9], "int32", 4)
    assert carried([USER, first, USER, ANSWER, USER]).messages == 2
    assert carried([first]).messages == 1
    for part in ("prompt_token_ids", "generation_token_ids"):
        assert carried([USER, ANSWER | {part: [5]}]).messages == 0
