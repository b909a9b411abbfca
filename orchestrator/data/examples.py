"""Examples to learn from: rows of a split, checked, and written as token ids of which some are trained on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.config.data import EVAL, SplitsConfig
from orchestrator.data.rendering import render
from orchestrator.data.splits import Messages, Row, sound
from orchestrator.data.tables import split_names
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.models.reading import reading
from quartet.wire.codec import Ints

Part = tuple[bool, Ints]
"""True for tokens that are trained on; and their ids."""
_TOGETHER = 1024
"""Texts that are tokenised at once."""
_SHOWN = 24
"""Characters at the end of a reply that an error shows."""
_REWRITES = (
    "writes earlier messages differently when others follow, so that replies in the midst cannot be told apart; "
    "train on the last one alone (data.replies: last)"
)
_BEGINS_OTHERWISE = (
    "does not begin a reply as it asks for one (add_generation_prompt), so that the reply cannot be told apart; use "
    "another template in the model's folder, or data.chat_template: false"
)
"""Problems of a template by which a longer conversation does not begin with the text of a shorter one."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a split, or of a range of it."""

    name: str
    """Name as configured, for instance `train[:90%]`."""
    columns: Columns
    """`each` trajectories for each example, one after the other."""
    rows: tuple[int, ...]
    """Row of each example in the split as stored."""
    each: int
    """Trajectories of an example."""
    left_out: int
    """Number of examples that were left out because they are too long."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Sequence[int]) -> Columns:
        """The trajectories of the examples with these indices."""
        return self.columns.take([self.each * index + member for index in chosen for member in range(self.each)])


def evaluation_split(config: SplitsConfig) -> str | None:
    """The split to evaluate on, if there is one."""
    return config.eval_split or (EVAL if EVAL in split_names(config.path) else None)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and the replies in it that are trained on."""

    place: str
    messages: Messages
    replies: Sequence[int]
    """Indices of messages, ascending; a reply has at least one message before it."""


def whole_chat(row: Row, key: str, *, last: bool) -> Chat:
    """The conversation in a column; all messages of the assistant in it are replies, or the `last` one alone.
    ConfigError, which names place and column, if it has none."""
    messages = row.messages(key)
    replies = [index for index, message in enumerate(messages) if index and message["role"] == "assistant"]
    if not replies or (last and replies[-1] != len(messages) - 1):
        raise ConfigError(
            f"{row.place}: column {key!r} should hold messages "
            + ("that end with one of the assistant" if last else "with one of the assistant after another's")
        )
    return Chat(row.place, messages, replies[-1:] if last else replies)


def answered_chat(row: Row, prompt: str, answer: str) -> Chat:
    """The conversation of a prompt's column and an answer's, each text or messages; its last message is a reply.

    An answer may repeat the prompt's messages before its own.

    Raises:
        ConfigError: the answer begins with other messages of the system or the user, or ends with none of the
            assistant. The message names place and column.
    """
    asked, answers = row.messages(prompt), row.messages(answer, "assistant")
    if _spoken(answers[: len(asked)]) == _spoken(asked):
        answers = answers[len(asked) :]
    elif (role := answers[0]["role"]) in ("system", "user"):
        raise ConfigError(
            f"{row.place}: column {answer!r} begins with a message of the {role} that column {prompt!r} does not "
            "begin with; it should hold the answer alone, or the very messages of the prompt before it"
        )
    if not answers or answers[-1]["role"] != "assistant":
        raise ConfigError(f"{row.place}: column {answer!r} should end with a message of the assistant")
    return Chat(row.place, [*asked, *answers], [len(asked) + len(answers) - 1])


def _spoken(messages: Messages) -> list[tuple[Any, Any]]:
    """Role and content of each message."""
    return [(message["role"], message["content"]) for message in messages]


def chats_as_parts(chats: Sequence[Chat], tokenizer: Any, ends: Sequence[int]) -> list[list[Part]]:
    """The token ids of conversations, as a rollout would have them.

    The chat template writes what comes before each reply, up to where the reply begins, and then both. Their
    difference is the reply, trained on up to the first of `ends` in it, where sampling stops. Of a prefix's ids those
    of the longer text are taken where they begin with them, else the difference is tokenised by itself.

    Raises:
        ConfigError: the tokenizer has no template, or it refuses a conversation, writes what comes before differently
            with the reply, or ends a reply with none of `ends`, so that stopping could not be learned. The message
            names the place.
    """
    asked = [(chat, index + after) for chat in chats for index in chat.replies for after in (0, 1)]
    texts = render(
        [chat.messages[:end] for chat, end in asked],
        tokenizer,
        [chat.place for chat, _ in asked],
        generating=[not place % 2 for place in range(len(asked))],
    )
    for text, (chat, _) in zip(texts, asked, strict=True):
        sound(text, chat.place)
    written = iter(zip(texts, _tokenised(texts, tokenizer), strict=True))
    return [_parts(chat, written, tokenizer, ends) for chat in chats]


def _parts(chat: Chat, written: Iterator[tuple[str, Ints]], tokenizer: Any, ends: Sequence[int]) -> list[Part]:
    """One conversation's; `written` gives text and ids of each prefix of it in turn."""
    parts: list[Part] = []
    text, ids = "", np.empty(0, np.int32)
    for _ in chat.replies:
        for reply in (False, True):
            longer, longer_ids = next(written)
            if not longer.startswith(text):
                raise ConfigError(f"{chat.place}: the chat template {_BEGINS_OTHERWISE if reply else _REWRITES}")
            begins = np.array_equal(longer_ids[: len(ids)], ids)
            more = longer_ids[len(ids) :] if begins else _tokenised([longer[len(text) :]], tokenizer)[0]
            text, ids = longer, np.concatenate([ids, more])
            end = next((place + 1 for place, token in enumerate(more) if reply and token in ends), None)
            if reply and end is None:
                raise ConfigError(
                    f"{chat.place}: the chat template ends a reply with {longer[-_SHOWN:]!r}, which holds no end "
                    "token of the model, so that it would not learn to stop; add the id of the token that ends a "
                    "reply to eos_token_id in the model's generation_config.json"
                )
            end = len(more) if end is None else end
            parts += [(reply, more[:end])] + ([(False, more[end:])] if end < len(more) else [])
    return parts if parts[-1][0] else parts[:-1]  # from what comes after the last reply nothing is learned


def texts_as_parts(texts: Sequence[tuple[str, str]], tokenizer: Any, *, append_eos: bool) -> list[list[Part]]:
    """The token ids of prompts, special tokens included, and of their answers, which are trained on."""
    if append_eos and tokenizer.eos_token_id is None:
        raise ConfigError("data.append_eos: the tokenizer has no end token; set it to false, or use a template")
    end = np.asarray([tokenizer.eos_token_id] if append_eos else [], np.int32)
    prompts = _tokenised([prompt for prompt, _ in texts], tokenizer, specials=True)
    answers = _tokenised([answer for _, answer in texts], tokenizer)
    both = zip(prompts, answers, strict=True)
    return [[(False, prompt), (True, np.concatenate([answer, end]))] for prompt, answer in both]


def _tokenised(texts: Sequence[str], tokenizer: Any, *, specials: bool = False) -> list[Ints]:
    """The ids of each text."""
    ids: list[Ints] = []
    with reading(f"the tokenizer of {tokenizer.name_or_path} fails on the data"):
        for start in range(0, len(texts), _TOGETHER):
            some = tokenizer(list(texts[start : start + _TOGETHER]), add_special_tokens=specials)["input_ids"]
            ids += [np.asarray(each, np.int32) for each in some]
    return ids


def _joined(parts: Sequence[Sequence[Part]]) -> Columns:
    """Trajectories of parts, of which those that are trained on are marked as sampled."""
    flat = [part for each in parts for part in each]
    lengths = [sum(len(ids) for _, ids in each) for each in parts]
    marks = np.repeat([trained for trained, _ in flat], [len(ids) for _, ids in flat])
    return Columns.of(np.concatenate([ids for _, ids in flat]), np.asarray(lengths, np.int32), marks)


def examples(
    name: str,
    rows: Sequence[Row],
    parts: Sequence[Sequence[Part]],
    *,
    max_length: int | None,
    vocabulary: int,
    rest: Callable[[list[int]], Mapping[str, np.ndarray]] = lambda kept: {},
) -> Examples:
    """The examples of rows, each of equally many trajectories, in their order.

    Args:
        name: the split as configured.
        rows: the rows.
        parts: those of each trajectory, all of a row's after one another.
        max_length: most tokens of a trajectory; examples with longer ones are left out. None: no limit.
        vocabulary: upper limit of ids.
        rest: further columns of a number for each trajectory, from the indices of the rows that are kept.

    Raises:
        ConfigError: an id is outside the vocabulary, a trajectory begins with a token that is trained on or has none,
            or no example is left. The message names the place.
    """
    each = len(parts) // len(rows)
    for index, own in enumerate(parts):
        _check(own, rows[index // each].place, vocabulary)
    lengths = [sum(len(part) for _, part in own) for own in parts]
    most = max(lengths) if max_length is None else max_length
    kept = [row for row in range(len(rows)) if max(lengths[each * row : each * (row + 1)]) <= most]
    if not kept:
        raise ConfigError(
            f"data split {name!r}: no example left of {len(rows)}: all are longer than max_length "
            f"({max_length} tokens)"
        )
    columns = _joined([own for row in kept for own in parts[each * row : each * (row + 1)]])
    numbers = tuple(rows[row].number for row in kept)
    return Examples(name, columns.with_rows(**rest(kept)), numbers, each, len(rows) - len(kept))


def _check(parts: Sequence[Part], place: str, vocabulary: int) -> None:
    if not len(parts[0][1]):
        raise ConfigError(f"{place}: the prompt has no tokens, and an answer needs one before it")
    if not any(len(ids) for trained, ids in parts if trained):
        raise ConfigError(f"{place}: the answer has no tokens")
    if (largest := max(int(ids.max(initial=0)) for _, ids in parts)) >= vocabulary:
        raise ConfigError(
            f"{place}: the tokenizer gives id {largest}, outside the model's vocabulary (0 to {vocabulary - 1}); use "
            "the tokenizer that belongs to the model"
        )
