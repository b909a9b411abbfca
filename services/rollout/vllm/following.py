"""Prompts that go on after a response: its exact tokens, and the new messages as the template writes them."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from quartet.wire.codec import Ints
from services.rollout.interface import Engine
from services.rollout.sessions import Begun

_MARK = f"response-{secrets.token_hex(16)}"
"""Stand-in for the response, a text that no message and no template holds."""


async def following(
    renderer: Any, engine: Engine, request: ChatCompletionRequest, messages: Sequence[Mapping[str, Any]], begun: Begun
) -> Ints | None:
    """The whole prompt of a request whose first messages are known as tokens, [T].

    The template renders the messages with a stand-in for the response; what it writes after that is tokenised. What
    was sampled is never rendered. Of the template's end of a response, the token that the response ends with itself
    is left out: the model's own end, or one that the request names.

    Args:
        renderer: vLLM's.
        engine: whose tokenizer encodes; no other task may use it meanwhile.
        request: the request as vLLM reads it.
        messages: all of its messages, as JSON.
        begun: the tokens, and the number of messages that they stand for.

    Returns:
        None if the template refuses the stand-in, or does not write it once and as it is: it has to render all
        messages then.
    """
    stand_in = [*messages[: begun.messages - 1], {"role": "assistant", "content": _MARK}, *messages[begun.messages :]]
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
    try:
        _, prompt = await renderer.render_messages_async(stand_in, params)
    except VLLMValidationError:
        return None
    _, found, tail = str(prompt["prompt"]).partition(_MARK)
    if not found or _MARK in tail:
        return None
    added = await asyncio.to_thread(
        engine.tokenizer, _after_end(tail, begun.ids, engine, request), add_special_tokens=False
    )
    whole: Ints = np.concatenate([begun.ids, np.asarray(added["input_ids"], np.int32)])
    return whole


def _after_end(tail: str, ids: Ints, engine: Engine, request: ChatCompletionRequest) -> str:
    """The text after a response, without the end of a response that its last token is already."""
    last = int(ids[-1])
    end = str(engine.tokenizer.decode([last])) if last in (*engine.end_ids, *(request.stop_token_ids or ())) else ""
    bare = tail.lstrip()
    return bare.removeprefix(end) if end and bare.startswith(end) else tail
