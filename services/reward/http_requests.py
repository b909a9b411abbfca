"""Requests to the scorers, made from bodies of requests over HTTP."""

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.wire.codec import pack_longs
from quartet.wire.errors import InvalidArgument, ServiceError
from services.reward.http_fields import GivenPair, Message, RewardsRequest

_IN_WIRE = re.compile(r"\A(?:tokens|texts|conversations)(?:\.(?:prompts|responses|lengths|messages))?(?=[\[.:])")
_SCORER = re.compile(r"\Ascorer(?=: )")
_TEXT_PARTS = ("output_text", "input_text", "text")
"""Types of a message's parts that are text."""


def of_texts(prompts: Sequence[str], responses: Sequence[str], labels: Sequence[str] = ()) -> pb.ScoreRequest:
    """Prompts and responses as text. A response whose prompt is empty is a whole text."""
    return pb.ScoreRequest(texts=pb.TextPairs(prompts=prompts, responses=responses), labels=labels)


def of_rewards(asked: RewardsRequest) -> pb.ScoreRequest:
    """The pairs of a request of Quartet's own, with all that it says of them.

    Raises:
        InvalidArgument: as `_of_pairs`.
    """
    pairs = asked.pairs
    made = _of_pairs(pairs)
    if any(pair.label for pair in pairs):
        made.labels.extend(pair.label for pair in pairs)
    if any(pair.columns for pair in pairs):
        made.columns.extend(json.dumps(pair.columns) for pair in pairs)
    groups = np.asarray([pair.group for pair in pairs if pair.group is not None], np.int64)
    # Every request may number its groups from 0 on, also where several come from one caller. The sum wraps around.
    made.groups = pack_longs(groups + np.int64(_numbered_from(asked.groups_of)))
    made.pair_timeout_s = asked.pair_timeout_s or 0.0
    return made


def _numbered_from(groups_of: str | None) -> int:
    """The number of group 0: the same in all requests with this text, and in no other without one."""
    if groups_of is None:
        return secrets.randbits(63)
    digest = hashlib.blake2b(groups_of.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _of_pairs(pairs: Sequence[GivenPair]) -> pb.ScoreRequest:
    """Pairs that are all texts, all conversations or all token ids.

    Raises:
        InvalidArgument: some prompts are texts and some messages, or an ids' side is empty.
    """
    if pairs[0].prompt_ids is not None:
        sides = [(pair.prompt_ids or [], pair.response_ids or []) for pair in pairs]
        for row, side in enumerate(sides):
            for name, ids in zip(("prompt_ids", "response_ids"), side, strict=True):
                if not ids:
                    raise InvalidArgument(f"pairs[{row}].{name}: empty; send at least one token")
        told = [pair.ended for pair in pairs]
        if None in told and {*told} != {None}:
            raise InvalidArgument("pairs: some say whether they ended and some do not; say it for all or none")
        ended = [bool(each) for each in told] if None not in told else []
        return pb.ScoreRequest(tokens=_packed(sides), ended=ended)
    made = _of_said(pairs)
    if any(pair.ended is False for pair in pairs):
        made.ended.extend(pair.ended is not False for pair in pairs)
    return made


def _of_said(pairs: Sequence[GivenPair]) -> pb.ScoreRequest:
    """Pairs that are all texts or all conversations. InvalidArgument if they are neither."""
    responses = [pair.response or "" for pair in pairs]
    chats = [pair.prompt for pair in pairs if not isinstance(pair.prompt, str)]
    if not chats:
        return of_texts([str(pair.prompt) for pair in pairs], responses)
    if len(chats) < len(pairs):
        raise InvalidArgument("pairs: some prompts are texts and some messages; send two requests")
    said = [
        _conversation([*(chat or ()), Message(role="assistant", content=response)])
        for chat, response in zip(chats, responses, strict=True)
    ]
    return pb.ScoreRequest(conversations=pb.Conversations(messages=said))


def of_queries(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> pb.ScoreRequest:
    """OpenRLHF's queries, of which each begins with its prompt or is a whole text."""
    cut = [
        len(prompt) if query.startswith(prompt) and len(query) > len(prompt) else 0
        for query, prompt in zip(queries, prompts or [""] * len(queries), strict=True)
    ]
    given = ["" if label is None else label if isinstance(label, str) else json.dumps(label) for label in labels]
    return of_texts(
        [query[:end] for query, end in zip(queries, cut, strict=True)],
        [query[end:] for query, end in zip(queries, cut, strict=True)],
        given if any(given) else [],
    )


def of_input(given: Any, messages: Sequence[Message] | None) -> pb.ScoreRequest:
    """vLLM's `input`, of whole texts or token ids, or a chat.

    Raises:
        InvalidArgument: ids of fewer than two tokens.
    """
    if messages is not None:
        return pb.ScoreRequest(conversations=pb.Conversations(messages=[_conversation(messages)]))
    rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(rows[0], str):
        return of_texts([""] * len(rows), rows)
    for row, ids in enumerate(rows):
        if len(ids) < 2:
            raise InvalidArgument(f"input[{row}]: {len(ids)} tokens; send at least two")
    return pb.ScoreRequest(tokens=_packed([(ids[:1], ids[1:]) for ids in rows]))


def inputs(given: Any) -> tuple[bool, list[str], list[str]]:
    """Text Embeddings Inference's `inputs`: whether it is one, its prompts and its responses."""
    single = isinstance(given, str) or isinstance(given[0], str)
    rows = [[given] if isinstance(given, str) else given] if single else given
    return single, [row[0] if len(row) > 1 else "" for row in rows], [row[-1] for row in rows]


def of_verify(given: dict[str, Any]) -> pb.ScoreRequest:
    """NeMo Gym's request: the messages or text of `responses_create_params.input`, the text at the end of
    `response.output`, and for the scorer all other fields.

    Raises:
        InvalidArgument: it has no text to score.
    """
    asked, output = given["responses_create_params"].get("input"), given["response"].get("output")
    others = {name: value for name, value in given.items() if name not in ("responses_create_params", "response")}
    response = _spoken(output)
    columns = json.dumps(others)
    label = next((others[name] for name in ("label", "expected_answer") if isinstance(others.get(name), str)), "")
    labels = [label] if label else []
    if isinstance(asked, str):
        texts = pb.TextPairs(prompts=[asked], responses=[response])
        return pb.ScoreRequest(texts=texts, labels=labels, columns=[columns])
    if not isinstance(asked, list) or not asked or not all(isinstance(each, dict) for each in asked):
        raise InvalidArgument("responses_create_params.input: should be a text, or a list of messages")
    said = [Message(role=_role(each, row), content=_content(each)) for row, each in enumerate(asked)]
    whole = _conversation([*said, Message(role="assistant", content=response)])
    return pb.ScoreRequest(conversations=pb.Conversations(messages=[whole]), labels=labels, columns=[columns])


def _role(message: dict[str, Any], row: int) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise InvalidArgument(f"responses_create_params.input[{row}].role: should be a text, such as user")
    return role


def _content(message: dict[str, Any]) -> str:
    """The text of a message whose content is a text, or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
    return "".join(text for text in texts if isinstance(text, str))


def _spoken(output: Any) -> str:
    """The text of an output's messages; what a model reasoned or called is none."""
    items = output if isinstance(output, list) else []
    said = [_content(item) for item in items if isinstance(item, dict) and item.get("type", "message") == "message"]
    if not any(said):
        raise InvalidArgument("response.output: has no message with text")
    return "\n".join(text for text in said if text)


def _conversation(messages: Sequence[Message]) -> str:
    return json.dumps([{"role": message.role, "content": message.text} for message in messages])


def _packed(sides: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bytes:
    """Trajectories of prompts and responses, given as ids."""
    prompts, responses = ([np.asarray(ids, np.int32) for ids in side] for side in zip(*sides, strict=True))
    return Columns.of_pairs(prompts, responses).pack()


def in_terms_of(error: ServiceError, field: str, by: str) -> ServiceError:
    """The same error, which names a field of the body in the place of that of the wire: the one that holds the pairs,
    or `by`, by which the scorer is named."""
    message = _SCORER.sub(by, _IN_WIRE.sub(field, str(error), count=1))
    if message == str(error):
        return error
    error.args = (message,)
    return error
