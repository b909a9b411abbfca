"""The fields of OpenAI's protocol that the rollout service takes, with their bounds. Without vLLM.

A request names nothing but text, tokens and sampling: fields for templates, media, grammars, adapters or plugins of
the engine are refused, as are all that are unknown.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from quartet.wire.errors import InvalidArgument
from services.rollout.sample import HOTTEST, MOST_STOPS

_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
MOST_STOP_TEXTS, LONGEST_STOP = 16, 256
"""Most stop strings of one request, and most characters of one."""
MOST_LIKELIEST = 20
"""Most likeliest tokens beside each sampled one; vLLM's own limit."""
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

_INTEGERS: Mapping[str, tuple[int, int]] = {
    "n": (1, 1),
    "seed": (0, _INT64),
    "top_k": (-1, _INT32),
    "max_tokens": (0, _INT32),
    "max_completion_tokens": (1, _INT32),
    "min_tokens": (0, _INT32),
    "top_logprobs": (0, MOST_LIKELIEST),
}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, HOTTEST),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_FLAGS = frozenset(
    {
        *("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens"),
        *("spaces_between_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
    }
)
_TEMPLATE_FLAGS = frozenset({"add_generation_prompt", "continue_final_message"})
_SAMPLING = (
    frozenset({*_NUMBERS, "n", "seed", "top_k", "max_tokens", "min_tokens", "stop", "stop_token_ids"}) | _FLAGS
)
_ANY = frozenset({"model", "user", "logprobs", "stream_options"}) | _SAMPLING
FIELDS: Mapping[str, frozenset[str]] = {
    "/v1/completions": _ANY | {"prompt", "echo"},
    "/v1/chat/completions": _ANY
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
    | _TEMPLATE_FLAGS,
    "/tokenize": frozenset({"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
    | {"chat_template_kwargs"}
    | _TEMPLATE_FLAGS,
    "/detokenize": frozenset({"model", "tokens"}),
}
"""Path -> the fields that its requests may have."""
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning", "reasoning_content"})


def read(body: bytes, path: str) -> dict[str, Any]:
    """The request in a body, with fields that are known and numbers that are within bounds; types of other fields are
    checked by vLLM.

    Raises:
        InvalidArgument: it is not; names the first field that is wrong and what would be right.
    """
    try:
        # As UTF-8 alone, in which the bounds were checked; json would take other encodings of bytes too.
        request = json.loads(body.decode(), parse_constant=_not_a_number)
        json.dumps(request, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument("the body holds half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise InvalidArgument(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict):
        raise InvalidArgument("the body should be a JSON object")
    given = {name: value for name, value in request.items() if value is not None}
    for name in given:
        if name not in FIELDS[path]:
            known = ", ".join(sorted(FIELDS[path]))
            raise InvalidArgument(f"{name[:64]}: not a field of {path} here; known: {known}")
    _check_numbers(given)
    _check_stops(given)
    if "messages" in given:
        _check_messages(given["messages"])
    if "chat_template_kwargs" in given:
        _check_variables(given["chat_template_kwargs"])
    if "tokens" in given:
        _check_tokens("tokens", given["tokens"], len(body))
    return given


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name in (_FLAGS | _TEMPLATE_FLAGS | {"echo", "return_token_strs"}) & given.keys():
        if not isinstance(given[name], bool):
            raise InvalidArgument(f"{name}: should be true or false")
    if "logprobs" in given and not isinstance(given["logprobs"], bool):
        _check_number("logprobs", given["logprobs"], 0, MOST_LIKELIEST, whole=True)
    for name, (least, most) in _INTEGERS.items():
        if name in given:
            _check_number(name, given[name], least, most, whole=True)
    for name, (low, high) in _NUMBERS.items():
        if name in given:
            _check_number(name, given[name], low, high, whole=False)
    if given.get("top_p") == 0:
        raise InvalidArgument("top_p: 0; should be above 0 and at most 1")


def _check_number(name: str, value: Any, least: float, most: float, *, whole: bool) -> None:
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if right and (whole or math.isfinite(value)) and least <= value <= most:
        return
    kind = "a whole number" if whole else "a number"
    should = f"be {least}" if least == most else f"be {kind} from {least:g} to {most:g}"
    shown = f"{value!r}"[:32] if right else f"a {type(value).__name__}"
    raise InvalidArgument(f"{name}: {shown}; should {should}")


def _check_stops(given: Mapping[str, Any]) -> None:
    stop = given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) > 0 for text in texts):
        raise InvalidArgument("stop: should be a text that is not empty, or a list of such")
    if len(texts) > MOST_STOP_TEXTS or any(len(text) > LONGEST_STOP for text in texts):
        raise InvalidArgument(f"stop: may be {MOST_STOP_TEXTS} texts of {LONGEST_STOP} characters at most")
    _check_tokens("stop_token_ids", given.get("stop_token_ids", []), MOST_STOPS)


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


def _check_messages(messages: Any) -> None:
    """Messages hold text alone, so that none can name an address or a file."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidArgument("messages: should be a list of objects with `role` and `content`")
    for index, message in enumerate(messages):
        for name, value in message.items():
            if value is not None and name not in _MESSAGE_FIELDS:
                known = ", ".join(sorted(_MESSAGE_FIELDS))
                raise InvalidArgument(f"messages[{index}].{name[:64]}: not a field here; known: {known}")
            if value is not None and name != "content" and not isinstance(value, str):
                raise InvalidArgument(f"messages[{index}].{name}: should be a text")
        if not message.get("role"):
            raise InvalidArgument(f"messages[{index}].role: missing; such as user")
        content = message.get("content")
        parts = [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content
        if not isinstance(parts, list) or not all(_is_text(part) for part in parts):
            raise InvalidArgument(f'messages[{index}].content: should be a text, or {{"type": "text"}} parts')


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )
