"""Requests in OpenAI's protocol: which fields they may have, and which numbers."""

import inspect
import json
import re
from itertools import permutations
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers.hf import safe_apply_chat_template
from vllm.sampling_params import SamplingParams

from quartet.wire.errors import InvalidArgument
from services.rollout.openai_fields import (
    FIELDS,
    GENERATE,
    LONGEST_TO_TOKENIZE,
    NO_VARIABLES,
    SAMPLING_FIELDS,
    of_session,
    read,
    rows_of,
)
from services.rollout.sample import COLDEST, HOTTEST, seed_of_turn
from services.rollout.session_terms import Terms
from tests.configuration import REPO

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS: dict[str, Any] = {TEXT: CompletionRequest, CHAT: ChatCompletionRequest}
SAMPLED = sorted(KINDS)
MESSAGE = {"role": "user", "content": "w5"}
GIVEN: dict[str, Any] = {
    **{"model": "m", "user": "u", "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}},
    **{"temperature": 0.5, "top_p": 0.5, "top_k": -1, "presence_penalty": -2, "frequency_penalty": 2.0, "n": 1},
    **{"seed": (1 << 63) - 1, "max_tokens": 5, "min_tokens": 0, "stop": ["a"], "stop_token_ids": [4], "echo": False},
    **{"ignore_eos": False, "include_stop_str_in_output": True, "skip_special_tokens": False},
    **{"add_special_tokens": True, "spaces_between_special_tokens": True, "return_token_ids": True},
    **{"return_tokens_as_token_ids": True, "prompt": "w5", "messages": [MESSAGE], "max_completion_tokens": 3},
    **{"top_logprobs": 2, "chat_template_kwargs": {"a": True}, "add_generation_prompt": True},
    **{"continue_final_message": False, "tools": [{"type": "function", "function": {"name": "look"}}]},
    **{"tool_choice": "auto", "parallel_tool_calls": True},
}


def refused(body: Any, path: str = TEXT) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read(body if isinstance(body, bytes) else json.dumps(body).encode(), path)
    return str(caught.value)


@pytest.mark.parametrize("path", SAMPLED)
def test_every_field_is_one_of_vllms_and_all_together_are_read(path: str) -> None:
    given = {name: GIVEN[name] for name in FIELDS[path]} | ({"logprobs": True} if path == CHAT else {})
    assert read(json.dumps(given).encode(), path) == given
    assert FIELDS[path] <= set(KINDS[path].model_fields)
    KINDS[path].model_validate(given)
    nothing = dict.fromkeys([*given, "documents", "logit_bias"])
    assert read(json.dumps(nothing).encode(), path) == {}


@pytest.mark.parametrize("path", SAMPLED)
def test_every_other_field_of_vllms_is_refused_by_name(path: str) -> None:
    others = set(KINDS[path].model_fields) - FIELDS[path] | {"unknown", "a" * 1000, ""}
    assert len(others) > 20
    assert {"structured_outputs", "logit_bias", "priority", "cache_salt", "vllm_xargs"} <= others
    for name in others:
        told = refused({name: 1}, path)
        assert told.startswith(f"{name[:64]}: not a field of {path} here; known: ")
        assert len(told) < 1000


def test_variables_of_a_template_are_plain_and_no_arguments_of_those_that_render_it() -> None:
    """Such as the length up to which a tokenizer fills a prompt."""
    functions = (PreTrainedTokenizerBase.apply_chat_template, safe_apply_chat_template)
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    assert {"tokenize", "padding", "max_length", "tokenizer", "tools"} <= arguments <= NO_VARIABLES
    for path in (CHAT, "/tokenize"):
        for name in arguments:
            told = refused({"messages": [MESSAGE], "chat_template_kwargs": {name: True}}, path)
            assert told == f"chat_template_kwargs.{name}: not a variable of a template"
        values: list[Any] = [[1], {}, "a" * 257, 10**300]
        for value in values:
            told = refused({"messages": [MESSAGE], "chat_template_kwargs": {"a": value}}, path)
            assert told.startswith("chat_template_kwargs.a: should be a text of 256 characters at most, a number")
        others: list[Any] = [5, [], {f"a{n}": 1 for n in range(17)}]
        for wrong in others:
            assert "an object of 16 members" in refused({"messages": [MESSAGE], "chat_template_kwargs": wrong}, path)


@pytest.mark.parametrize("tokens", [5, True, "5", [True], [-1], [1 << 31], [0.5], [[5]]])
def test_tokens_are_whole_numbers_in_a_list(tokens: Any) -> None:
    assert refused({"tokens": tokens}, "/detokenize").startswith("tokens: ")


def test_a_body_in_another_encoding_than_utf_8_is_refused() -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        assert refused(json.dumps({"prompt": "w5"}).encode(encoding)).startswith("the body is not JSON")


def test_tokens_are_asked_for_by_text_or_messages() -> None:
    assert FIELDS["/tokenize"] <= {*TokenizeChatRequest.model_fields, *TokenizeCompletionRequest.model_fields}
    assert FIELDS["/detokenize"] == set(DetokenizeRequest.model_fields)
    assert refused({"prompt": "w5", "tools": []}, "/tokenize") == "tools: only with messages"
    for wrong in ("tool_choice", "chat_template", "media_io_kwargs", "mm_processor_kwargs"):
        assert refused({"messages": [MESSAGE], wrong: 1}, "/tokenize").startswith(
            f"{wrong}: not a field of /tokenize"
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.1}, "temperature: 2.1; should be a number from 0 to 2"),
        ({"temperature": -1}, "temperature: -1; should be a number from 0 to 2"),
        ({"temperature": "1"}, "temperature: a str; should be a number from 0 to 2"),
        ({"temperature": True}, "temperature: a bool; should be"),
        *(({name: 10**400}, f"{name}: 1000") for name in ("temperature", "top_p", "presence_penalty", "logprobs")),
        ({"frequency_penalty": -(10**400)}, "frequency_penalty: -1000"),
        ({"top_p": 0}, "top_p: 0; should be above 0 and at most 1"),
        ({"top_p": [1]}, "top_p: a list; should be"),
        ({"temperature": 0.009}, "temperature: 0.009; should be 0 or from 0.01 to 2"),
        ({"n": 0}, "n: 0; should be a whole number from 1 to 128"),
        ({"n": 129}, "n: 129; should be a whole number from 1 to 128"),
        ({"seed": -1}, "seed: -1; should be a whole number from 0"),
        ({"seed": 1 << 63}, "seed: 9223372036854775808; should be"),
        ({"seed": 1.5}, "seed: a float; should be"),
        ({"top_k": 1 << 40}, "top_k: 1099511627776; should be"),
        ({"max_tokens": 10**4000}, "max_tokens: 1000"),
        ({"max_tokens": 0}, "max_tokens: 0; should be a whole number from 1"),
        ({"min_tokens": -1}, "min_tokens: -1; should be"),
        ({"logprobs": 21}, "logprobs: 21; should be a whole number from 0 to 20"),
        ({"logprobs": -1}, "logprobs: -1; should be"),
        ({"stop": [""]}, "stop: should be a text that is not empty"),
        ({"stop": ["a"] * 17}, "stop: may be 16 texts of 256 characters at most"),
        ({"stop": "a" * 257}, "stop: may be 16 texts"),
        ({"stop": {"a": 1}}, "stop: should be a text"),
        ({"stop_token_ids": [0] * 257}, "stop_token_ids: should be a list of 256 tokens at most"),
        ({"stop_token_ids": 3}, "stop_token_ids: should be a list"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids: a float; should be"),
        ({"stream": 1}, "stream: should be true or false"),
        ({"echo": "yes"}, "echo: should be true or false"),
        ({"ignore_eos": []}, "ignore_eos: should be true or false"),
    ],
)
def test_numbers_have_bounds(fields: dict[str, Any], message: str) -> None:
    told = refused(fields)
    assert told.startswith(message)
    assert len(told) < 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON: "),
        (b"{", "the body is not JSON: "),
        (b"\xff", "the body is not JSON: "),
        (b"[1]", "the body should be a JSON object"),
        (b'"a"', "the body should be a JSON object"),
        (b'{"temperature": NaN}', "the body is not JSON: NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "the body is not JSON: -Infinity is not a JSON number"),
        (b'{"temperature": 1e400}', "the body is not JSON: 1e400 is larger than any number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body is not JSON: "),
        (b'{"prompt": "\\ud800"}', "the body holds half of a surrogate pair"),
        (b'{"a":' * 100_000, "the body is not JSON: "),
    ],
    ids=range(11),
)
def test_bodies_that_are_no_request(body: bytes, message: str) -> None:
    assert refused(body).startswith(message)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("w5", "messages: should be a list of objects"),
        ([], "messages: should be a list of objects"),
        (["w5"], "messages: should be a list of objects"),
        ([{"content": "w5"}], "messages[0].role: missing; such as user"),
        ([MESSAGE, {"role": 5}], "messages[1].role: should be a text"),
        ([{"role": "user", "content": 5}], "messages[0].content: should be a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}], ""),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "file:///etc/passwd"}]}], ""),
        ([{"role": "user", "content": ["a"]}], "messages[0].content: should be a text"),
        (
            [{"role": "user", "content": "a", "audio": {}}],
            "messages[0].audio: not a field here; known: content, generation_log_probs, generation_token_ids, name",
        ),
        ([{"role": "user", "prompt_token_ids": [5]}], "messages[0].prompt_token_ids: only an assistant's message"),
        ([{"role": "assistant", "generation_token_ids": [-1]}], "messages[0].generation_token_ids: -1; should be"),
        ([{"role": "assistant", "generation_log_probs": "a"}], "messages[0].generation_log_probs: should be a list"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls: should be a list of 128 calls at most"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}],
            "messages[0].tool_calls[0]: should be",
        ),
        ([{"role": "tool", "tool_call_id": 5}], "messages[0].tool_call_id: should be a text"),
    ],
)
def test_messages_hold_text_alone(messages: Any, message: str) -> None:
    assert re.match(re.escape(message) or r"messages\[0\]\.content", refused({"messages": messages}, CHAT))


def test_messages_of_text_and_of_a_clients_own_answers_are_taken() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "w5"}]}
    answer = {"role": "assistant", "content": "w6", "refusal": None, "tool_calls": None, "audio": None}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tokens = {"prompt_token_ids": [5], "generation_token_ids": [6], "generation_log_probs": [-0.5]}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]} | tokens
    found = {"role": "tool", "content": "w7", "tool_call_id": "c"}
    given = {"messages": [MESSAGE, parts, answer, calls, found, {"role": "assistant", "tool_calls": []}]}
    assert read(json.dumps(given).encode(), CHAT) == given


def test_of_several_wrong_fields_the_first_is_named() -> None:
    """Sets of texts have another order in each process."""
    for first, second in permutations(("echo", "stream", "ignore_eos", "skip_special_tokens"), 2):
        assert refused({"prompt": "a", first: 5, second: 5}, TEXT) == f"{first}: should be true or false"


ARGUMENTS = "messages[0].tool_calls[0].function.arguments: "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("[" * 20_000 + "]" * 20_000, f"{ARGUMENTS}the text's lists and objects are more than 32 levels deep"),
        ("[" + "0," * 200_000 + "0]", f"{ARGUMENTS}the text has more than 131072 elements"),
        ("9" * 5000, f"{ARGUMENTS}Exceeds the limit"),
    ],
    ids=["deep", "many", "digits"],
)
def test_arguments_of_calls_are_bounded_as_bodies_are(arguments: str, message: str) -> None:
    assert refused({"messages": calling([arguments])}, CHAT).startswith(message)


def test_halves_of_characters_in_arguments_are_replaced_and_others_stay_as_they_are() -> None:
    given = ['{"a": ["\\ud800b", {"\\udc00": 1.0}]}', '{ "a": "\\ud83d\\ude00" }', "no {JSON"]
    messages = read(json.dumps({"messages": calling(given)}).encode(), CHAT)["messages"]
    taken = [message["tool_calls"][0]["function"]["arguments"] for message in messages]
    assert taken == ['{"a": ["?b", {"?": 1.0}]}', *given[1:]]


def calling(arguments: list[str]) -> list[dict[str, Any]]:
    """A message with a call for each of the arguments."""
    return [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "a", "arguments": each}}],
        }
        for each in arguments
    ]


def test_arguments_of_all_calls_together_are_bounded() -> None:
    half = "[" + "0," * 70_000 + "0]"
    assert read(json.dumps({"messages": calling([half, "{}", "no {JSON", ""])}).encode(), CHAT)
    told = refused({"messages": calling([half, half])}, CHAT)
    assert told == "messages[1].tool_calls: more than 131072 elements up to here"


def test_messages_and_what_is_only_tokenised_are_bounded() -> None:
    assert refused({"messages": [MESSAGE] * 4097}, CHAT) == "messages: 4097; may be 4096 at most"
    assert read(json.dumps({"messages": [MESSAGE] * 4096}).encode(), CHAT)
    told = refused({"prompt": "a" * LONGEST_TO_TOKENIZE}, "/tokenize")
    assert told == "the body has more than 524288 bytes; send the text in parts"
    assert read(json.dumps({"prompt": "a" * (LONGEST_TO_TOKENIZE - 20)}).encode(), "/tokenize")


@pytest.mark.parametrize(
    "tools", [{}, [5], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}], [{}] * 129]
)
def test_tools_are_functions_with_names(tools: Any) -> None:
    assert refused({"messages": [MESSAGE], "tools": tools}, CHAT).startswith("tools")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "a"}}, 5, ["auto"]])
def test_no_grammar_chooses_in_the_models_place(choice: Any) -> None:
    told = refused({"messages": [MESSAGE], "tools": [], "tool_choice": choice}, CHAT)
    assert told.startswith("tool_choice: should be auto or none")


def test_sampling_of_tokens_has_fields_of_its_own_with_the_same_bounds() -> None:
    known = set(inspect.signature(SamplingParams).parameters)
    assert known >= SAMPLING_FIELDS
    assert not SAMPLING_FIELDS & {"extra_args", "structured_outputs", "logits_processors", "logit_bias", "bad_words"}
    for sampling, message in (
        ({"temperature": 3}, "temperature: 3; should be"),
        ({"logprobs": True}, "logprobs: a bool"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: 21; should be"),
        ({"stop": 5}, "stop: should be a text"),
        ({"n": 129}, "n: 129; should be a whole number from 1 to 128"),
        ({"temperature": 1e-9}, "temperature: 1e-09; should be 0 or from 0.01 to 2"),
        ({"extra_args": {}}, "extra_args: not a field of sampling_params here; known: "),
        ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start: -1; should be"),
        ([], "sampling_params: should be an object"),
    ):
        assert refused({"token_ids": [5], "sampling_params": sampling}, GENERATE).startswith(message)
    later_turn = b'{"token_ids": [5], "sampling_params": {"routed_experts_prompt_start": 7, "max_tokens": 3}}'
    assert read(later_turn, GENERATE)["sampling_params"] == {"max_tokens": 3}
    assert read(b'{"token_ids": [5], "sampling_params": null}', GENERATE) == {"token_ids": [5], "sampling_params": {}}


def test_temperatures_are_those_that_vllm_samples_at() -> None:
    """vLLM raises lower ones, so that a session would say another than that of its log-probs."""
    for temperature in (0.0, COLDEST, 0.02, HOTTEST):
        assert SamplingParams(temperature=temperature).temperature == temperature
    assert SamplingParams(temperature=COLDEST / 2).temperature == COLDEST


def test_a_prompt_can_be_scored_without_a_response() -> None:
    assert read(b'{"prompt": "w5", "max_tokens": 0, "echo": true}', TEXT)
    for path, body in (
        (TEXT, {"prompt": "w5"}),
        (TEXT, {"prompt": "w5", "echo": False}),
        (CHAT, {"messages": [MESSAGE]}),
    ):
        assert refused({**body, "max_tokens": 0}, path).endswith(
            "should be a whole number from 1, or 0 with echo: true"
        )


@pytest.mark.parametrize("prompt", [[True], [5, False], [[5], [6, True]]])
def test_true_and_false_are_no_tokens_and_no_numbers(prompt: Any) -> None:
    assert refused({"prompt": prompt}) == "prompt: holds true or false; should be texts or tokens"
    assert refused({"prompt": [5], "logprobs": True}).startswith("logprobs: a bool; should be a whole number from 0")
    assert read(b'{"messages": [{"role": "user"}], "logprobs": true}', CHAT)


def test_prompts_are_bounded() -> None:
    assert refused({"prompt": ["w5"] * 1025}) == "prompt: 1025 prompts; may be 1024 at most"
    assert read(json.dumps({"prompt": [[5]] * 1024}).encode(), TEXT)
    assert read(json.dumps({"prompt": [5] * 5000}).encode(), TEXT)


def test_responses_are_counted_before_they_are_made() -> None:
    for given, rows in (
        *(({}, 1), ({"prompt": "w5"}, 1), ({"prompt": [5, 6]}, 1), ({"prompt": ["w5", "w6"], "n": 3}, 6)),
        *(({"prompt": [[5], [6]]}, 2), ({"messages": [MESSAGE], "n": 4}, 4), ({"prompt": []}, 1)),
        ({"token_ids": [5, 6], "sampling_params": {"n": 2}}, 2),
    ):
        assert rows_of(given) == rows


@pytest.mark.parametrize("holder", [lambda given: given, lambda given: {"sampling_params": given}])
def test_a_session_has_one_temperature_and_nothing_that_bends_it(holder: Any) -> None:
    fine = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "presence_penalty": 0, "min_tokens": 0, "seed": 5}
    assert of_session(holder(fine), Terms(0.7), 0) == holder(fine)
    assert of_session(holder({}), Terms(0.7), 0) == holder({"temperature": 0.7})
    for name, value in (
        ("temperature", 0.6),
        ("top_p", 0.9),
        ("top_k", 3),
        ("min_tokens", 1),
        ("prompt_logprobs", 0),
    ):
        with pytest.raises(InvalidArgument, match=f"{name}: {value}; should be .* in a session"):
            of_session(holder({name: value}), Terms(0.7), 0)


@pytest.mark.parametrize("holder", [dict, lambda fields: {"sampling_params": fields}])
def test_a_run_s_session_has_its_seeds_and_its_longest_response(holder: Any) -> None:
    terms = Terms(seed=11, max_tokens=8)
    assert of_session(holder({"seed": 5}), terms, 0) == holder({"temperature": 1.0, "seed": 11, "max_tokens": 8})
    later = of_session(holder({"max_tokens": 4}), terms, 2)
    assert later == holder({"temperature": 1.0, "seed": seed_of_turn(11, 2), "max_tokens": 4})
    assert len({seed_of_turn(11, turn) for turn in range(100)}) == 100


def test_the_newer_name_of_a_longest_response_is_bounded_too() -> None:
    bounded = of_session({"messages": [], "max_completion_tokens": 4}, Terms(max_tokens=8), 0)
    assert bounded == {"messages": [], "temperature": 1.0, "max_tokens": 4}


def test_null_in_one_of_several_sessions_is_a_field_that_is_left_out() -> None:
    body = {"sessions": [{"task_id": None, "seed": 3}, {"task_id": "b", "seed": None}, {"lease": None}]}
    given = read(json.dumps(body).encode(), "/rl/start_session")
    assert given == {"sessions": [{"seed": 3}, {"task_id": "b"}, {}]}


NO_SESSIONS: list[Any] = [[], {}, 3, [{}] * 1025]


@pytest.mark.parametrize(
    ("path", "given", "said"),
    [
        *(
            ("/rl/start_session", {"sessions": wrong}, "sessions: should be a list of 1 to 1024")
            for wrong in NO_SESSIONS
        ),
        ("/rl/start_session", {"sessions": [{}, 3]}, r"sessions\[1\]: should be an object"),
        ("/rl/start_session", {"sessions": [{"lease": 1}]}, r"lease: not a field of sessions\[0\] here"),
        ("/rl/start_session", {"sessions": [{"seed": -1}]}, r"sessions\[0\].seed: -1; should be"),
        ("/rl/start_session", {"sessions": [{"task_id": 7}]}, r"sessions\[0\].task_id: should be a text"),
        ("/rl/trajectory", {"session_ids": "a"}, "session_ids: should be a list of 1024 texts at most"),
        ("/rl/trajectory", {"remove_ids": [3]}, "remove_ids: should be a list of 1024 texts at most"),
        ("/rl/trajectory", {"remove_ids": ["a"] * 1025}, "remove_ids: should be a list of 1024 texts at most"),
    ],
)
def test_what_is_wrong_with_several_sessions_is_named(path: str, given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read(json.dumps(given).encode(), path)


def test_the_page_lists_the_fields_of_each_path() -> None:
    text = (REPO / "docs/openai.md").read_text().partition("| request | fields |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines()[2:]]
    fields = {request.strip(): set(re.findall(r"`(\w+)`", names)) for request, names in rows}
    both = fields.pop("both kinds of `/v1/…completions`")
    told = {path.strip("`"): names | (both if "completions" in path else set()) for path, names in fields.items()}
    assert told.pop("its `sampling_params`".strip("`")) == SAMPLING_FIELDS
    assert told == {path: names for path, names in FIELDS.items() if not path.startswith("/rl/")}
