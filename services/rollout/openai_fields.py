"""The fields of OpenAI's protocol and Anthropic's that the rollout service takes, with their bounds. Without vLLM.

A request names nothing but text, tokens, tools and sampling: fields for templates, media, grammars, adapters or
plugins of the engine are refused, as are all that are unknown.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from quartet.trajectory import LARGEST_REWARD
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument
from quartet.wire.json_bounds import MOST_ELEMENTS, check_bounds
from quartet.wire.json_object import json_object, whole_characters
from services.rollout.sample import COLDEST, HOTTEST, MOST_STOPS, seed_of_turn
from services.rollout.session_terms import LONGEST_KEPT_S, Terms
from services.rollout.sessions import LONGEST_TASK

_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
MOST_STOP_TEXTS, LONGEST_STOP = 16, 256
"""Most stop strings of one request, and most characters of one."""
MOST_PROMPTS = 1024
"""Most prompts of one request; vLLM's own limit."""
MOST_LIKELIEST = 20
"""Most likeliest tokens beside each sampled one; vLLM's own limit."""
MOST_CHOICES = 128
"""Most responses for one prompt; OpenAI's own limit."""
MOST_TOOLS = 128
"""Most tools of one request."""
MOST_MESSAGES = 4096
"""Most messages of one request."""
LONGEST_TO_TOKENIZE = 512 << 10
"""Most bytes of a body with text to tokenise: nothing else bounds it, as the length of a model bounds a prompt."""
LONGEST_SALT = 1024
"""Most characters of what divides the cache; vLLM's own limit."""
MOST_AT_ONCE = 1024
"""Most sessions that a request starts, asks for or removes."""
_EACH_SESSION = frozenset({"task_id", "seed"})
"""Fields of one of several sessions that are started together."""
MOST_VARIABLES, LONGEST_VARIABLE = 16, 256
"""Most variables of a chat template in one request, and most characters of one."""
NO_VARIABLES = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "self"),
        *("model_config", "tokenizer"),
    }
)
"""Arguments of the functions that render a template, in transformers and in vLLM."""

NO_EXPERTS = "routed_experts_prompt_start"
"""Field that says from which token on experts are told. verifiers' client sends it from its second turn on, even
where none are; without a meaning here."""
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "n": (1, MOST_CHOICES),
    "seed": (0, _INT64),
    "top_k": (-1, _INT32),
    "max_tokens": (0, _INT32),
    "max_completion_tokens": (1, _INT32),
    "min_tokens": (0, _INT32),
    "top_logprobs": (0, MOST_LIKELIEST),
    "prompt_logprobs": (0, MOST_LIKELIEST),
    "group_size": (1, 1),
    "max_length": (1, _INT32),
    "min_version": (0, _INT32),
    "max_version": (0, _INT32),
    NO_EXPERTS: (0, _INT32),
}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, HOTTEST),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_OF_SESSIONS: Mapping[str, tuple[float, float]] = {
    "reward": (-LARGEST_REWARD, LARGEST_REWARD),
    "kept_s": (1.0, LONGEST_KEPT_S),
}
_FLAGS = frozenset(
    {
        *("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens"),
        *("spaces_between_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
    }
)
_OTHER_FLAGS = frozenset({"echo", "return_token_strs", "parallel_tool_calls", "detokenize", "remove"})
_TEMPLATE_FLAGS = frozenset({"add_generation_prompt", "continue_final_message"})
_ALL_FLAGS = _FLAGS | _OTHER_FLAGS | _TEMPLATE_FLAGS
_SAMPLING = (
    frozenset({*_NUMBERS, "n", "seed", "top_k", "max_tokens", "min_tokens", "stop", "stop_token_ids"}) | _FLAGS
)
_ANY = frozenset({"model", "user", "logprobs", "stream_options"}) | _SAMPLING
GENERATE = "/inference/v1/generate"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WITHOUT_EFFECT = frozenset({"metadata", "thinking", "context_management", "service_tier", "cache_control"})
"""Fields of Anthropic's protocol that its clients send and that mean nothing here."""
_OF_PROMPT = frozenset({"model", "messages", "system", "tools", "tool_choice"}) | WITHOUT_EFFECT
FIELDS: Mapping[str, frozenset[str]] = {
    "/v1/completions": _ANY | {"prompt", "echo"},
    "/v1/chat/completions": _ANY
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
    | {"tools", "tool_choice", "parallel_tool_calls"}
    | _TEMPLATE_FLAGS,
    GENERATE: frozenset({"model", "token_ids", "sampling_params", "stream", "stream_options", "return_token_ids"})
    | {"cache_salt"},
    "/tokenize": frozenset({"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
    | {"chat_template_kwargs", "tools"}
    | _TEMPLATE_FLAGS,
    "/detokenize": frozenset({"model", "tokens"}),
    MESSAGES: _OF_PROMPT | {"max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"},
    COUNT: _OF_PROMPT,
    "/rl/start_session": frozenset({"task_id", "group_size", "temperature", "seed", "max_tokens", "max_length"})
    | {"kept_s", "lease", "min_version", "max_version", "purpose", "sessions"},
    "/rl/set_reward": frozenset({"reward", "interaction_id"}),
    "/rl/end_session": frozenset(),
    "/rl/trajectory": frozenset({"session_id", "remove", "session_ids", "remove_ids"}),
}
"""Path -> the fields that its requests may have."""
SAMPLING_FIELDS = (_SAMPLING | {"logprobs", "prompt_logprobs", "detokenize", NO_EXPERTS}) - {
    *("stream", "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids")
}
"""Fields of `sampling_params` in a request of tokens."""
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields of an assistant's message, in the form of NeMo-Gym: the tokens that it was sampled from, those that it is,
and their log-probs. A client passes them back unchanged."""
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", *TOKEN_FIELDS}
)


def read(body: bytes, path: str) -> dict[str, Any]:
    """The request in a body, with fields that are known and numbers that are within bounds; types of other fields are
    checked by vLLM.

    Raises:
        InvalidArgument: it is not; names the first field that is wrong and what would be right.
    """
    if path == "/tokenize" and len(body) > LONGEST_TO_TOKENIZE:
        raise InvalidArgument(f"the body has more than {LONGEST_TO_TOKENIZE} bytes; send the text in parts")
    given = fields_of(json_object(body), FIELDS[path], path)
    _check_numbers(given, of_chat="messages" in FIELDS[path])
    _check_stops(given)
    if path == GENERATE:
        given["sampling_params"] = _read_sampling(given.get("sampling_params"))
    prompts = _prompts(given)
    if any(isinstance(token, bool) for each in prompts for token in (each if isinstance(each, list) else [each])):
        raise InvalidArgument("prompt: holds true or false; should be texts or tokens")
    if len(prompts) > MOST_PROMPTS:
        raise InvalidArgument(f"prompt: {len(prompts)} prompts; may be {MOST_PROMPTS} at most")
    if "messages" in given:
        _check_messages(given["messages"], len(body))
    if "chat_template_kwargs" in given:
        _check_variables(given["chat_template_kwargs"])
    if "tools" in given:
        _check_tools(given["tools"], with_messages="messages" in given)
    if given.get("tool_choice", "auto") not in ("auto", "none"):
        raise InvalidArgument(
            "tool_choice: should be auto or none; others would let a grammar choose tokens in the model's place"
        )
    for name in ("tokens", "token_ids"):
        if name in given:
            _check_tokens(name, given[name], len(body))
    for name, longest in (("cache_salt", LONGEST_SALT), ("task_id", LONGEST_TASK), ("interaction_id", LONGEST_TASK)):
        _check_text(name, given.get(name, ""), longest)
    if "sessions" in given:
        given["sessions"] = _read_sessions(given["sessions"])
    for name in ("session_ids", "remove_ids"):
        ids = given.get(name, [])
        if not (isinstance(ids, list) and len(ids) <= MOST_AT_ONCE and all(isinstance(each, str) for each in ids)):
            raise InvalidArgument(f"{name}: should be a list of {MOST_AT_ONCE} texts at most")
    return given


def _read_sessions(sessions: Any) -> list[dict[str, Any]]:
    """The sessions that a request starts together."""
    if not (isinstance(sessions, list) and 0 < len(sessions) <= MOST_AT_ONCE):
        raise InvalidArgument(f"sessions: should be a list of 1 to {MOST_AT_ONCE} objects")
    return [_read_session(each, f"sessions[{place}]") for place, each in enumerate(sessions)]


def _read_session(session: Any, where: str) -> dict[str, Any]:
    if not isinstance(session, dict):
        raise InvalidArgument(f"{where}: should be an object")
    given = fields_of(session, _EACH_SESSION, where)
    _check_text(f"{where}.task_id", given.get("task_id", ""), LONGEST_TASK)
    if "seed" in given:
        _check_number(f"{where}.seed", given["seed"], *_INTEGERS["seed"], whole=True)
    return given


def fields_of(given: Mapping[str, Any], known: frozenset[str], where: str) -> dict[str, Any]:
    """The fields that are not null. InvalidArgument for the first of them that is not known."""
    fields = {name: value for name, value in given.items() if value is not None}
    for name in fields:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise InvalidArgument(f"{name[:64]}: not a field of {where} here; known: {names}")
    return fields


def _read_sampling(sampling: Any) -> dict[str, Any]:
    """The `sampling_params` of a request of tokens, of which nothing else is vLLM's own."""
    if not isinstance(sampling, dict | None):
        raise InvalidArgument("sampling_params: should be an object")
    given = fields_of(sampling or {}, SAMPLING_FIELDS, "sampling_params")
    _check_numbers(given)
    _check_stops(given)
    given.pop(NO_EXPERTS, None)
    return given


def rows_of(given: Mapping[str, Any]) -> int:
    """Number of responses that a request asks for."""
    return len(_prompts(given)) * int(given.get("sampling_params", given).get("n", 1))


def _prompts(given: Mapping[str, Any]) -> list[Any]:
    prompt = given.get("prompt")
    return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]


def of_session(given: Mapping[str, Any], terms: Terms, turn: int) -> dict[str, Any]:
    """The fields of a request within a session, on its terms. `turn` is the request's number in the session.

    Raises:
        InvalidArgument: a field would have the tokens come from another distribution than the one that is trained, or
            the session would not hold what was sampled.
    """
    sampling = given.get("sampling_params", given)
    wrong: Mapping[str, tuple[Any, ...]] = {
        **{"temperature": (terms.temperature,), "top_p": (1,), "top_k": (0, -1), "presence_penalty": (0,)},
        **{"frequency_penalty": (0,), "min_tokens": (0,), "prompt_logprobs": (), "echo": (False,), "n": (1,)},
        **{"add_generation_prompt": (True,), "continue_final_message": (False,)},
    }
    for name, right in wrong.items():
        for holder in (given, sampling):
            if name in holder and holder[name] not in right:
                should = " or ".join(map(str, right)) or "left out"
                raise InvalidArgument(
                    f"{name}: {str(holder[name])[:32]}; should be {should} in a session, whose tokens are trained on "
                    "with the log-probs of the policy as it is"
                )
    ours: dict[str, Any] = {"temperature": terms.temperature}
    if terms.seed is not None or terms.purpose is not Purpose.FOREIGN:
        # The request's own counts for nothing: agents often send the same each time, and so would draw the same, as
        # would all samples of a run's prompt.
        ours["seed"] = None if terms.seed is None else seed_of_turn(terms.seed, turn)
    if terms.max_tokens is not None:
        asked = [int(sampling[name]) for name in ("max_tokens", "max_completion_tokens") if name in sampling]
        ours["max_tokens"] = min([terms.max_tokens, *asked])
    if "sampling_params" in given:
        return {**given, "sampling_params": {**sampling, **ours}}
    if "max_tokens" in ours:  # which the other would go before
        given = {name: value for name, value in given.items() if name != "max_completion_tokens"}
    return {**given, **ours}


def _check_numbers(given: Mapping[str, Any], *, of_chat: bool = False) -> None:
    for name, value in given.items():
        if name in _ALL_FLAGS and not isinstance(value, bool):
            raise InvalidArgument(f"{name}: should be true or false")
    if "logprobs" in given and not (of_chat and isinstance(given["logprobs"], bool)):
        _check_number("logprobs", given["logprobs"], 0, MOST_LIKELIEST, whole=True)
    for name, (least, most) in _INTEGERS.items():
        if name in given:
            _check_number(name, given[name], least, most, whole=True)
    for name, (low, high) in {**_NUMBERS, **_OF_SESSIONS}.items():
        if name in given:
            _check_number(name, given[name], low, high, whole=False)
    if given.get("max_tokens") == 0 and not given.get("echo"):
        raise InvalidArgument("max_tokens: 0; should be a whole number from 1, or 0 with echo: true")
    if given.get("top_p") == 0:
        raise InvalidArgument("top_p: 0; should be above 0 and at most 1")
    if 0 < given.get("temperature", 0) < COLDEST:
        raise InvalidArgument(
            f"temperature: {given['temperature']:g}; should be 0 or from {COLDEST:g} to {HOTTEST:g}"
        )


def _check_number(name: str, value: Any, least: float, most: float, *, whole: bool) -> None:
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if right and least <= value <= most:
        return
    kind = "a whole number" if whole else "a number"
    should = f"be {least}" if least == most else f"be {kind} from {least:g} to {most:g}"
    shown = f"{value!r}"[:32] if right else f"a {type(value).__name__}"
    raise InvalidArgument(f"{name}: {shown}; should {should}")


def _check_text(name: str, value: Any, longest: int) -> None:
    if not (isinstance(value, str) and len(value) <= longest):
        raise InvalidArgument(f"{name}: should be a text of {longest} characters at most")


def _check_stops(given: Mapping[str, Any]) -> None:
    check_stop_texts("stop", given.get("stop", []))
    _check_tokens("stop_token_ids", given.get("stop_token_ids", []), MOST_STOPS)


def check_stop_texts(name: str, stop: Any) -> None:
    """Raises InvalidArgument if texts that end a response, in the field of this name, are not within the bounds."""
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) > 0 for text in texts):
        raise InvalidArgument(f"{name}: should be a text that is not empty, or a list of such")
    if len(texts) > MOST_STOP_TEXTS or any(len(text) > LONGEST_STOP for text in texts):
        raise InvalidArgument(f"{name}: may be {MOST_STOP_TEXTS} texts of {LONGEST_STOP} characters at most")


def _check_tokens(name: str, tokens: Any, most: int) -> None:
    if not isinstance(tokens, list) or len(tokens) > most:
        raise InvalidArgument(f"{name}: should be a list of {most} tokens at most")
    for token in tokens:
        _check_number(name, token, 0, _INT32, whole=True)


def _check_variables(variables: Any) -> None:
    """Variables of a template are plain values, and none is an argument of the functions that call it: of these, some
    would make a tokenizer fill memory."""
    if not isinstance(variables, dict) or len(variables) > MOST_VARIABLES:
        raise InvalidArgument(f"chat_template_kwargs: should be an object of {MOST_VARIABLES} members at most")
    for name, value in variables.items():
        if name in NO_VARIABLES:
            raise InvalidArgument(f"chat_template_kwargs.{name}: not a variable of a template")
        if not isinstance(value, str | bool | int | float | None) or len(str(value)) > LONGEST_VARIABLE:
            raise InvalidArgument(
                f"chat_template_kwargs.{name[:64]}: should be a text of {LONGEST_VARIABLE} characters at most, a "
                "number, true or false"
            )


def _check_tools(tools: Any, *, with_messages: bool) -> None:
    """Tools are descriptions of functions, which the template writes into the prompt."""
    if not with_messages:
        raise InvalidArgument("tools: only with messages")
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise InvalidArgument(f"tools: should be a list of {MOST_TOOLS} functions at most")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]
        if not named or tool.get("type") != "function":
            raise InvalidArgument(f'tools[{index}]: should be {{"type": "function", "function": {{"name": ...}}}}')


def _check_messages(messages: Any, most: int) -> None:
    """Messages hold text, calls of tools and tokens alone, so that none can name an address or a file."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidArgument("messages: should be a list of objects with `role` and `content`")
    if len(messages) > MOST_MESSAGES:
        raise InvalidArgument(f"messages: {len(messages)}; may be {MOST_MESSAGES} at most")
    elements = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        for name, value in message.items():
            if value is None:
                continue
            if name not in _MESSAGE_FIELDS:
                known = ", ".join(sorted(_MESSAGE_FIELDS))
                raise InvalidArgument(f"{where}.{name[:64]}: not a field here; known: {known}")
            if name == "tool_calls":
                elements += _check_calls(value, where)
                if elements > MOST_ELEMENTS:
                    raise InvalidArgument(f"{where}.tool_calls: more than {MOST_ELEMENTS} elements up to here")
            elif name in TOKEN_FIELDS:
                _check_own_tokens(message, name, f"{where}.{name}", most)
            elif name != "content" and not isinstance(value, str):
                raise InvalidArgument(f"{where}.{name}: should be a text")
        if not message.get("role"):
            raise InvalidArgument(f"{where}.role: missing; such as user")
        content = message.get("content")
        if not isinstance(content, str | None) and not (isinstance(content, list) and all(map(_is_text, content))):
            raise InvalidArgument(f'{where}.content: should be a text, or {{"type": "text"}} parts')


def _check_calls(calls: Any, where: str) -> int:
    """Returns the number of elements in the arguments, which are JSON that vLLM parses, and mends their halves of
    characters."""
    if not isinstance(calls, list) or len(calls) > MOST_TOOLS:
        raise InvalidArgument(f"{where}.tool_calls: should be a list of {MOST_TOOLS} calls at most")
    elements = 0
    for index, call in enumerate(calls):
        function: Any = call.get("function") if isinstance(call, dict) else None
        right = (
            isinstance(function, dict)
            and function.keys() == {"name", "arguments"}
            and all(isinstance(text, str) for text in (*function.values(), call.get("id", "")))
        )
        if not right:
            raise InvalidArgument(
                f'{where}.tool_calls[{index}]: should be {{"id": ..., "type": "function", "function": {{"name": ..., '
                '"arguments": ...}}, with texts'
            )
        named = f"{where}.tool_calls[{index}].function.arguments"
        count, function["arguments"] = _read_arguments(function["arguments"], named)
        elements += count
    return elements


def _read_arguments(text: str, where: str) -> tuple[int, str]:
    """The number of elements in a call's arguments, and the text, with question marks in place of halves of
    characters, which a stream told as a model wrote them. Text that is not JSON is vLLM's to judge: it reads an empty
    object where a model wrote such."""
    try:
        elements = check_bounds(text.encode())
        with contextlib.suppress(json.JSONDecodeError):
            said = json.dumps(json.loads(text), ensure_ascii=False)
            if (whole := whole_characters(said)) != said:
                text = whole
    except ValueError as error:  # a number with too many digits, which vLLM cannot read either
        raise InvalidArgument(f"{where}: {str(error)[:200]}") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {str(error).replace('the body', 'the text')}") from None
    return elements, text


def _check_own_tokens(message: Mapping[str, Any], name: str, where: str, most: int) -> None:
    if message.get("role") != "assistant":
        raise InvalidArgument(f"{where}: only an assistant's message has been sampled")
    if name != "generation_log_probs":
        _check_tokens(where, message[name], most)
    elif not isinstance(message[name], list):
        raise InvalidArgument(f"{where}: should be a list")


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )
