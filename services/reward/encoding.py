"""Conversion of calls, given as ids, texts or conversations, to the inputs of scorers: pass by pass, never a whole
call at once."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.serving.share import Share
from quartet.wire.codec import Floats, Ints, check_length, pack_floats, pack_longs, unpack_longs
from quartet.wire.errors import InvalidArgument
from quartet.wire.outcomes import Unscored
from quartet.wire.pairs import LEAST_S, Pair
from services.reward.places import bringing
from services.reward.scorers.scorer import EncodedPair, InParts, Result

NO_TEXT = Pair("", "")
"""Placeholder for the text of ids when no scorer reads texts."""
NO_IDS = np.zeros(0, np.int32)
"""Placeholder for the ids of texts when the scorer has no tokenizer."""
_MOST_COST = 1 << 30
_MOST_SAID = 200
"""Most characters of a chat template's own error in a message."""


Placed = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""Takes a row and places in its response, as numbers of characters, and gives them as the caller reads them."""


class ScoreCall:
    """A batcher's view of one Score call: the costs of its rows, the scorers' inputs, and the scores."""

    def __init__(
        self,
        costs: NDArray[np.int32],
        items: Callable[[Sequence[int]], list[EncodedPair]],
        each: int,
        placed: Placed,
    ) -> None:
        """`each` is the number of scores of a row."""
        self.costs = costs
        self.items = items
        self._placed = placed
        self._parts: dict[int, InParts] = {}
        self.out: Floats = np.full((len(costs), each), np.nan, np.float32)
        """The scores, [B, K]; NaN for rows that are not scored."""
        self.unscored: dict[int, Unscored] = {}
        """Row -> the reason why it is not scored."""

    def put(self, rows: Sequence[int], results: Sequence[Result]) -> None:
        """Stores the results of these rows."""
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Unscored):
                self.unscored[row] = result
            elif isinstance(result, InParts):
                self._parts[row] = result
                self.out[row] = result.score
            else:
                self.out[row] = result

    @property
    def in_parts(self) -> bool:
        """True if `response` has to find the tokens that earn parts of scores, which takes time."""
        return bool(self._parts)

    def response(self, scorer: pb.ScorerIdentity) -> pb.ScoreResponse:
        """The answer to the call."""
        outcomes = np.zeros(len(self.out), np.uint8)
        for row, each in self.unscored.items():
            outcomes[row] = each.outcome
        return pb.ScoreResponse(
            scores=pack_floats(self.out),
            scorer=scorer,
            outcomes=outcomes.tobytes() if self.unscored else b"",
            reasons=[self.unscored[row].reason for row in sorted(self.unscored)],
            **self._earned(),
        )

    def _earned(self) -> dict[str, bytes]:
        """The parts of the scores, as the fields of the answer that hold them; none without."""
        if not self._parts:
            return {}
        rows = sorted(self._parts)
        parts = [self._parts[row] for row in rows]
        return {
            "part_pairs": pack_longs(np.repeat(rows, [len(each.places) for each in parts])),
            "part_places": pack_longs(
                np.concatenate([self._placed(row, each.places) for row, each in zip(rows, parts, strict=True)])
            ),
            "part_rewards": pack_floats(np.concatenate([each.rewards for each in parts])),
        }


class Received:
    """A Score request that has been counted but not decoded."""

    def __init__(self, request: pb.ScoreRequest) -> None:
        """Counts the rows. InvalidArgument if the request holds no pairs of any kind."""
        kind = request.WhichOneof("pairs")
        if kind is None:
            raise InvalidArgument("pairs: set tokens, texts or conversations")
        self.request = request
        self.field = str(kind)
        self.packed = request.tokens if kind == "tokens" else None
        self._tokens = 0
        if self.packed is not None:
            pairs, self._tokens = Columns.measure(self.packed, "tokens")
        else:
            texts = request.texts
            pairs = max(len(texts.prompts), len(texts.responses), len(request.conversations.messages))
        self.rows = max(pairs, len(request.labels), len(request.columns), len(request.groups) // 8)
        """Number of pairs or of what belongs to them, the largest of these."""

    def tokens(self) -> int:
        """Number of tokens; of all texts, bytes. Reads every text, so the number of rows is checked first."""
        request = self.request
        texts = (
            *(request.texts.prompts, request.texts.responses, request.conversations.messages),
            *(request.labels, request.columns),
        )
        return self._tokens + sum(sum(map(size_of, each)) for each in texts)


class Encoder:
    """Turns ids into text, and texts and conversations into ids, by one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_length: int,
        *,
        texts: bool = True,
        ids: bool = True,
        each: int = 1,
    ) -> None:
        """
        Args:
            tokenizer: the tokenizer of the requests' ids; None if the scorer has none.
            vocab_size: upper limit of ids.
            max_length: most tokens of a pair.
            texts: True if a scorer reads the text of ids.
            ids: True if a scorer reads ids.
            each: number of scores of a pair.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._texts = texts
        self._ids = ids
        self._each = each

    def token_ids(self, text: str, special: bool) -> list[int]:
        """The ids of a text, with special tokens or without. InvalidArgument if the scorer has no tokenizer."""
        if self._tokenizer is None:
            raise InvalidArgument("model: the scorer has no tokenizer")
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def call(self, received: Received, share: Share) -> ScoreCall:
        """The pairs of a request, by a caller of this share, after all checks that need no tokenizer. InvalidArgument
        names the wrong field."""
        request = received.request
        made: Callable[[_Known, Sequence[int]], list[EncodedPair]]
        placed: Placed = _in_text
        if received.packed is not None:
            if self._tokenizer is None:
                raise InvalidArgument("tokens: the scorer has no tokenizer; send texts or conversations")
            trajectories = Columns.received(
                received.packed, {}, vocab_size=self._vocab_size, max_length=self._max_length, field="tokens"
            ).last_sequences()
            costs, made = trajectories.lengths, partial(self._from_tokens, trajectories)
            placed = partial(self._earning, trajectories)
        elif received.field == "texts":
            costs, made = _of_texts(request), self._from_texts
        else:
            costs, made = _of_conversations(request), self._from_conversations
        known = _Known(request, len(costs), share)
        return ScoreCall(costs, lambda rows: made(known, rows), self._each, placed)

    def _from_tokens(self, trajectories: Columns, known: "_Known", rows: Sequence[int]) -> list[EncodedPair]:
        prompts, responses = trajectories.prompts, trajectories.responses
        asked, answers = [prompts[row] for row in rows], [responses[row] for row in rows]
        if not self._texts:
            return [EncodedPair(p, r, NO_TEXT) for p, r in zip(asked, answers, strict=True)]
        texts = self._tokenizer.batch_decode([*asked, *answers], skip_special_tokens=True)
        eos, several, ended = self._tokenizer.eos_token_id, not trajectories.single_turn, known.request.ended
        pairs = zip(asked, answers, texts[: len(rows)], texts[len(rows) :], rows, strict=True)
        return [
            EncodedPair(
                p,
                r,
                known.pair(
                    row,
                    prompt=pt,
                    response=rt,
                    ended=ended[row] if ended else bool(r[-1] == eos),
                    texts=self._parts(trajectories, row) if several else (),
                ),
            )
            for p, r, pt, rt, row in pairs
        ]

    def _earning(self, trajectories: Columns, row: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sampled tokens of a trajectory, counted from 1, that earn what is at these places of its response's
        text: those that bring them, or the last one before what was given, such as an environment's answer."""
        start = int(trajectories.starts[row])
        response = slice(start + int(trajectories.prompt_lengths[row]), start + int(trajectories.lengths[row]))
        ids = trajectories.ids[response]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        counted: NDArray[np.int64] = np.cumsum(trajectories.sampled[response], dtype=np.int64)
        return counted[bringing(self._tokenizer, ids, text, places)]

    def _parts(self, trajectories: Columns, row: int) -> tuple[str, ...]:
        """The texts of what follows the prompt, if it is more than a response."""
        segments = trajectories.segments(row)
        if len(segments) == 1:
            return ()
        return tuple(self._tokenizer.batch_decode(segments, skip_special_tokens=True))

    def _from_texts(self, known: "_Known", rows: Sequence[int]) -> list[EncodedPair]:
        texts = known.request.texts
        prompts, responses = [texts.prompts[row] for row in rows], [texts.responses[row] for row in rows]
        # Without a prompt the response is a whole text.
        answers = [r if p else self._without_begin(r) for p, r in zip(prompts, responses, strict=True)]
        sides = zip(map(self._without_begin, prompts), map(self._without_end, answers), rows, strict=True)
        pairs = [
            known.pair(row, prompt=prompt, response=response, ended=known.ended(row))
            for prompt, response, row in sides
        ]
        return self._encoded(prompts, responses, pairs, rows, "texts")

    def _without_end(self, response: str) -> str:
        """The response without the texts of end-of-sequence and padding tokens, which other systems leave there."""
        texts = self._texts_of("eos_token", "pad_token")
        end = at = len(response)
        while found := next((text for text in texts if response.endswith(text, 0, at)), ""):
            end = at = at - len(found)
            while at and response[at - 1].isspace():
                at -= 1
        return response[:end]

    def _without_begin(self, prompt: str) -> str:
        """The prompt without the texts of tokens that begin and pad a sequence."""
        texts = self._texts_of("bos_token", "pad_token")
        begin = at = 0
        while found := next((text for text in texts if prompt.startswith(text, at)), ""):
            begin = at = at + len(found)
            while at < len(prompt) and prompt[at].isspace():
                at += 1
        return prompt[begin:]

    def _texts_of(self, *names: str) -> tuple[str, ...]:
        """The texts of those of the tokenizer's special tokens that it has."""
        return tuple(text for name in names if (text := getattr(self._tokenizer, name, None)))

    def _begun(self, ids: Sequence[int]) -> list[int]:
        """The ids without padding before them, and with one token that begins a sequence if there is one or more."""
        bos, pad = self._tokenizer.bos_token_id, self._tokenizer.pad_token_id
        begin = next((at for at, token in enumerate(ids) if token not in (bos, pad)), len(ids))
        return [*([bos] if bos in ids[:begin] else []), *ids[begin:]]

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """The ids without padding after them, and with one token that ends a sequence if there is one or more."""
        eos, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        end = next((len(ids) - at for at, token in enumerate(reversed(ids)) if token not in (eos, pad)), 0)
        return [*ids[:end], *([eos] if eos in ids[end:] else [])]

    def _encoded(
        self, prompts: Sequence[str], responses: Sequence[str], pairs: Sequence[Pair], rows: Sequence[int], field: str
    ) -> list[EncodedPair]:
        """The pairs with the ids of these texts, which stand in these rows of a field."""
        if self._tokenizer is None:
            return [EncodedPair(NO_IDS, NO_IDS, pair) for pair in pairs]
        eos = self._tokenizer.eos_token_id
        end = [] if eos is None else [eos]
        prompt_ids = [np.asarray(self._begun(ids), np.int32) for ids in self._tokenizer([*prompts])["input_ids"]]
        answers = self._tokenizer([*map(self._without_end, responses)], add_special_tokens=False)["input_ids"]
        response_ids = [
            np.asarray([*ids, *(end if pair.ended else ())], np.int32)
            for ids, pair in zip(answers, pairs, strict=True)
        ]
        for n, prompt in enumerate(prompts):
            if not prompt and responses[n]:  # a whole text, whose tokens are scored as they stand
                ids = self._ended(self._begun(self._tokenizer(responses[n])["input_ids"]))
                whole = np.asarray(ids, np.int32)
                if len(whole) < 2:
                    raise InvalidArgument(f"{field}[{rows[n]}]: {len(whole)} tokens and no prompt; needs two")
                prompt_ids[n], response_ids[n] = whole[:1], whole[1:]
        return self._checked(prompt_ids, response_ids, pairs, rows, field)

    def _checked(
        self,
        prompts: Sequence[Ints],
        responses: Sequence[Ints],
        pairs: Sequence[Pair],
        rows: Sequence[int],
        field: str,
    ) -> list[EncodedPair]:
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            for side, ids in (("prompt", prompt), ("response", response)):
                if not len(ids):
                    raise InvalidArgument(f"{field}[{row}]: the {side} has no tokens")
            check_length(len(prompt), len(response), self._max_length, f"{field}[{row}]")
        return [EncodedPair(p, r, pair) for p, r, pair in zip(prompts, responses, pairs, strict=True)]

    def _from_conversations(self, known: "_Known", rows: Sequence[int]) -> list[EncodedPair]:
        talks = [_messages(known.request.conversations.messages[row], row) for row in rows]
        responses = [str(messages[-1]["content"]) for messages in talks]
        if getattr(self._tokenizer, "chat_template", None):
            ids = [self._rendered(messages, row) for messages, row in zip(talks, rows, strict=True)]
            prompts = self._tokenizer.batch_decode([prompt for prompt, _ in ids], skip_special_tokens=True)
        elif self._ids:
            raise InvalidArgument("conversations: the scorer's tokenizer has no chat template; send texts or tokens")
        else:
            ids = None
            prompts = ["\n".join(_content(message) for message in messages[:-1]) for messages in talks]
        pairs = [
            known.pair(row, prompt=prompt, response=response, messages=tuple(messages), ended=known.ended(row))
            for prompt, response, messages, row in zip(prompts, responses, talks, rows, strict=True)
        ]
        if ids is None:
            return self._encoded(prompts, responses, pairs, rows, "conversations")
        return self._checked([p for p, _ in ids], [r for _, r in ids], pairs, rows, "conversations")

    def _rendered(self, messages: Sequence[dict[str, Any]], row: int) -> tuple[Ints, Ints]:
        """The ids of the conversation as the template renders it, up to the response and from there on."""
        render = partial(self._tokenizer.apply_chat_template, return_dict=False)
        try:
            whole, prompt = render(messages), render(messages[:-1], add_generation_prompt=True)
        except Exception as error:  # of the model's template, which may refuse roles and their order
            raise InvalidArgument(
                f"conversations[{row}]: the chat template of the scorer's tokenizer does not take it: "
                f"{type(error).__name__}: {str(error)[:_MOST_SAID]}"
            ) from None
        # The prompt as it is asked may end otherwise than it goes on where the answer stands.
        same = [a == b for a, b in zip(whole, prompt, strict=False)]
        begin = same.index(False) if False in same else len(same)
        return np.asarray(whole[:begin], np.int32), np.asarray(whole[begin:], np.int32)


def _in_text(row: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    return places


class _Known:
    """All that a request says of its pairs beside their texts."""

    def __init__(self, request: pb.ScoreRequest, pairs: int, share: Share) -> None:
        """InvalidArgument unless there is one for each of so many pairs, or none. `share` is the caller's."""
        self.request = request
        self._share = share
        self._groups = unpack_longs(request.groups, "groups").tolist()
        given = {"labels": request.labels, "ended": request.ended, "columns": request.columns, "groups": self._groups}
        for name, values in given.items():
            if values and len(values) != pairs:
                raise InvalidArgument(f"{name}: {len(values)} for {pairs} pairs; send one each, or none")
        seconds = request.pair_timeout_s
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidArgument(f"pair_timeout_s: {seconds}; must be finite and not negative")
        if 0 < seconds < np.float32(LEAST_S):
            raise InvalidArgument(
                f"pair_timeout_s: {seconds:.3g}; must be {LEAST_S:g} or more, or 0 for what the scorer allows"
            )
        self._timeout_s = seconds or None

    def ended(self, row: int) -> bool:
        """False if the request says that a response given as text was cut off."""
        return self.request.ended[row] if self.request.ended else True

    def pair(self, row: int, **fields: Any) -> Pair:
        """A pair of these texts. InvalidArgument if its columns cannot be read."""
        request = self.request
        return Pair(
            **fields,
            label=request.labels[row] if request.labels else "",
            columns=_object(request.columns[row], f"columns[{row}]") if request.columns else {},
            group=self._group(row),
            timeout_s=self._timeout_s,
        )

    def _group(self, row: int) -> int | None:
        """The number of the pair's group, which no pair of another caller has: a batch holds pairs of several, whose
        own numbers may be the same."""
        if not self._groups:
            return None
        share = self._share
        whose = repr((share.name, share.run, share.purpose.name, self._groups[row]))
        digest = hashlib.blake2b(whose.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _of_texts(request: pb.ScoreRequest) -> NDArray[np.int32]:
    """The costs of pairs of texts."""
    prompts, responses = request.texts.prompts, request.texts.responses
    if not prompts:
        raise InvalidArgument("texts: empty; send at least one prompt and response")
    if len(prompts) != len(responses):
        raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")
    return _costs([size_of(p) + size_of(r) for p, r in zip(prompts, responses, strict=True)])


def _of_conversations(request: pb.ScoreRequest) -> NDArray[np.int32]:
    """The costs of conversations."""
    if not request.conversations.messages:
        raise InvalidArgument("conversations: empty; send at least one")
    return _costs([size_of(each) for each in request.conversations.messages])


def _costs(sizes: Sequence[int]) -> NDArray[np.int32]:
    # A text has at most one token per byte, plus a first and a last special token.
    return np.asarray([min(size + 2, _MOST_COST) for size in sizes], np.int32)


def _read(text: str, where: str) -> Any:
    """The value of a JSON text. InvalidArgument if it has none, or one that no UTF-8 can hold."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a pair of surrogates is no character
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{where}: is not JSON") from None
    return value


def _object(text: str, where: str) -> dict[str, Any]:
    value = _read(text, where)
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}: should be a JSON object")
    return value


def _messages(text: str, row: int) -> list[dict[str, Any]]:
    """The messages of a conversation, which ends with a response."""
    where = f"conversations[{row}]"
    messages = _read(text, where)
    if not isinstance(messages, list) or len(messages) < 2:
        raise InvalidArgument(f"{where}: should be a JSON list of two messages or more")
    for index, message in enumerate(messages):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise InvalidArgument(f"{where}[{index}]: should be an object with `role` and `content`")
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise InvalidArgument(f"{where}[{len(messages) - 1}]: should be of role assistant, with text as its content")
    return messages


def _content(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be text or parts of it."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def size_of(text: str) -> int:
    """Number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
