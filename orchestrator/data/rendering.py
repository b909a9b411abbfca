"""Chat templates: programs that come with a model, and are therefore run with limits."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.data.bounded import bounded
from quartet.config.base import GIB, MIB, ConfigError

MEMORY = GIB
"""Bytes that rendering may take, beyond eight times the characters of the messages."""
LEAST_S, EACH_S = 60.0, 0.01
"""Seconds that rendering may take, and more of them for each conversation; usually it takes a thousandth of that."""
_WORD, _MARK = "question", f"response-{secrets.token_hex(8)}"
"""Stand-ins for a prompt and for a response; the second is a word that neither a template nor an answer has."""
_TOGETHER = 256
"""Conversations whose texts are handed over at once."""


def render(
    conversations: Sequence[list[dict[str, Any]]],
    tokenizer: Any,
    where: Sequence[str],
    *,
    generating: Sequence[bool] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """The text of each conversation, as the tokenizer's chat template renders it.

    Args:
        conversations: messages, each with a role and content.
        tokenizer: a Hugging Face tokenizer.
        where: place of each conversation, with which errors begin.
        generating: True for each conversation whose text should end where a reply begins; None: all.
        tools: JSON schemas of functions that the model may call.

    Raises:
        ConfigError: the tokenizer has no template, or it refuses a conversation, or goes beyond the limits of time,
            memory or text.
    """
    if not tokenizer.chat_template:
        raise ConfigError("data.chat_template: the tokenizer has none; turn it off or use a chat model's")
    count = len(conversations)
    given = sum(len(repr(messages)) for messages in conversations) + count * len(repr(tools))
    most = 16 * MIB + 64 * 1024 * count + 16 * given

    def work() -> Iterator[list[str]]:
        total, texts = 0, []
        ends = [True] * count if generating is None else generating
        for messages, place, end in zip(conversations, where, ends, strict=True):
            text = _rendered(messages, tokenizer, place, end, tools)
            total += len(text)
            if total > most:
                raise ConfigError(f"{place}: the chat template has written more than {most} characters by then")
            texts.append(text)
            if len(texts) == _TOGETHER:
                yield texts
                texts = []
        yield texts

    parts = bounded(work, "data.chat_template", memory=MEMORY + 8 * given, seconds=LEAST_S + EACH_S * count)
    return [text for texts in parts for text in texts]


def follow(
    answers: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    where: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
) -> list[str]:
    """The text of messages as it follows a response: its end of turn, the messages, and the beginning of the next
    response. The template renders each answer behind a response of one word, in the place of what was sampled, which
    is never rendered.

    Arguments and errors are those of `render`; ConfigError also if the template does not write a response as it is.
    """
    stand_in = [{"role": "user", "content": _WORD}, {"role": "assistant", "content": _MARK}]
    texts = render([[*stand_in, *map(dict, messages)] for messages in answers], tokenizer, where, tools=tools)
    for text, place in zip(texts, where, strict=True):
        if text.count(_MARK) != 1:
            raise ConfigError(f"{place}: the chat template does not write a response once and as it is")
    return [text.partition(_MARK)[2] for text in texts]


def _rendered(
    messages: list[dict[str, Any]], tokenizer: Any, place: str, generating: bool, tools: Sequence[Mapping[str, Any]]
) -> str:
    given: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generating, **given))
    except MemoryError:
        raise
    except Exception as error:  # a template may raise whatever Python does
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{place}: the chat template refuses the messages: {reason}") from None
