"""Prompts: read from disk, checked, tokenised, and numbered in the order in which a run takes them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.config.data import DataConfig
from orchestrator.data.rendering import render
from orchestrator.data.tables import Table, open_split
from quartet.config.base import ConfigError
from quartet.config.explain import shown
from quartet.models.reading import reading
from quartet.wire.codec import Ints
from quartet.wire.pairs import label_of

_SHOWN = 80
"""Most characters of a wrong value that an error repeats."""
MOST_TASKS = 64
"""Most tasks of a split, as each has metrics of its own."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the rollout service."""

    row: int
    """Row in the split as stored, before any shuffling; the same in every run."""
    prompt_ids: Ints
    """Token ids, shape [prompt_length]."""
    text: str
    """The text that was tokenised: the input column, or the conversation as the chat template renders it."""
    label: str
    """Label for function scorers; empty if there is none."""
    task: str = ""
    """Task by which scores and lengths are measured too; empty if there is none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of further columns for function scorers, as JSON has them."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a split, or of a range of it."""

    name: str
    """Name as configured, for instance `train[:90%]`."""
    prompts: tuple[Prompt, ...]
    """The prompts in the order of the file, or shuffled by `split_seed`."""
    too_long: int
    """Number of prompts that were left out because they exceed `max_prompt_length`."""


def load_prompts(
    config: DataConfig,
    tokenizer: Any,
    split: str,
    *,
    vocab_size: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptSet:
    """Reads, tokenises and filters the prompts of `split`: a name, with a range such as `[:90%]` if wanted.

    Args:
        tokenizer: one of Hugging Face's.
        vocab_size: the policy's vocabulary. If given, ids outside it are an error: the tokenizer is another model's.
        tools: JSON schemas of functions that the model may call, which a chat template writes into each prompt.

    Raises:
        ConfigError: the path, the split, its range or a column does not exist, a row cannot be a prompt, the
            tokenizer fails, or no prompt is left. The message names the field, and the existing splits or columns.
    """
    name, start, stop = parse_split(split)
    table = open_split(config.path, name)
    where = f"data.path {config.path}, split {name!r}"
    keys = {"input_key": config.input_key, "label_key": config.label_key, "task_key": config.task_key}
    check_columns(keys | {f"columns.{index}": key for index, key in enumerate(config.columns)}, table, where)
    indices = selected(len(table.rows), start, stop, split, config.split_seed)
    rows = [table.rows[index] for index in indices]
    places = [table.place(index) for index in indices]
    texts = _texts([row[config.input_key] for row in rows], tokenizer, config, places, tools)
    # A chat template writes the special tokens itself.
    with reading(f"the tokenizer of {tokenizer.name_or_path} fails on prompts of {where}"):
        token_ids = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
    labels, tasks = (
        [_text_in(row, key, place, as_text) for row, place in zip(rows, places, strict=True)]
        for key, as_text in ((config.label_key, label_of), (config.task_key, str))
    )
    further = [
        {key: _plain(row[key], f"{place}: column {key!r}") for key in config.columns}
        for row, place in zip(rows, places, strict=True)
    ]
    if len(different := {*tasks} - {""}) > MOST_TASKS:
        raise ConfigError(
            f"data.task_key: column {config.task_key!r} of {where} has {len(different)} different values, each of "
            f"which would be measured by itself; {MOST_TASKS} are the most"
        )
    prompts = [
        Prompt(index, np.asarray(ids, np.int32), text, label, task, columns)
        for index, text, ids, label, task, columns in zip(
            indices, texts, token_ids, labels, tasks, further, strict=True
        )
    ]
    for prompt, place in zip(prompts, places, strict=True):
        _check_ids(prompt, vocab_size, place)
    kept = tuple(prompt for prompt in prompts if len(prompt.prompt_ids) <= config.max_prompt_length)
    if not kept:
        raise ConfigError(
            f"{where}: no prompt left of {len(prompts)}: all are longer than "
            f"data.max_prompt_length ({config.max_prompt_length} tokens)"
        )
    return PromptSet(split, kept, len(prompts) - len(kept))


def check_disjoint(train: PromptSet, evaluation: PromptSet) -> None:
    """Raises ConfigError if two ranges of the same data share a row: held-out prompts must not be trained on."""
    rows = [[prompt.row for prompt in each.prompts] for each in (train, evaluation)]
    check_rows((train.name, rows[0]), (evaluation.name, rows[1]))


def check_rows(train: tuple[str, Sequence[int]], evaluation: tuple[str, Sequence[int]]) -> None:
    """The same for two ranges, each by its name as configured and its rows."""
    names = [name.partition("[")[0] for name, _ in (train, evaluation)]
    if names[0] == names[1] and (shared := {*train[1]} & {*evaluation[1]}):
        raise ConfigError(
            f"data.prompt_split {train[0]!r} and data.eval_split {evaluation[0]!r} share {len(shared)} "
            f"row(s) of {names[0]!r}, row {min(shared)} for one; choose ranges that do not overlap, "
            f"for instance {names[0]}[:90%] and {names[0]}[90%:]"
        )


class PromptStream:
    """An endless stream of prompts: each pass over the data is a new permutation of all of them.

    A sample's prompt depends only on its number and the seed, so that a resumed run needs only the next number. For
    example with 3 prompts, numbers 0 to 2 are one permutation of them and numbers 3 to 5 another; with 2 samples of
    each, numbers 0 to 5 are one permutation, in pairs.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, each: int = 1) -> None:
        """`each` samples in a row have the same prompt. Raises ValueError without prompts, or if each < 1."""
        if not prompts:
            raise ValueError("prompts: empty; there must be at least one")
        if each < 1:
            raise ValueError(f"each: should be at least 1, got {each}")
        self._prompts, self._seed, self._each = prompts, seed, each
        self._orders: dict[int, NDArray[np.int64]] = {}

    def dealt(self, number: int) -> Prompt:
        """The prompt of the sample with this number; numbers count from 0."""
        if number < 0:
            raise ValueError(f"number: should be at least 0, got {number}")
        epoch, place = divmod(number // self._each, len(self._prompts))
        return self._prompts[int(self._epoch(epoch)[place])]

    def _epoch(self, number: int) -> NDArray[np.int64]:
        if number not in self._orders:
            if len(self._orders) > 1:  # two, for batches that cross the border between passes
                self._orders.clear()
            self._orders[number] = np.random.default_rng([self._seed, number]).permutation(len(self._prompts))
        return self._orders[number]


_RANGE = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\])?")
_BOUND = re.compile(r"(?P<row>\d+)|(?P<percent>100|\d{1,2}(?:\.\d+)?)%")


def parse_split(split: str) -> tuple[str, str, str]:
    """`train[:90%]` -> ("train", "", "90%")."""
    match = _RANGE.fullmatch(split)
    bounds = (match["start"] or "", match["stop"] or "") if match else ("", "")
    if not match or any(bound and not _BOUND.fullmatch(bound) for bound in bounds):
        raise ConfigError(
            f"data split {split!r}: should be a name, or a name with a range of row numbers from 0 up or of "
            "percentages up to 100%: train, train[100:200], train[500:], train[:90%]"
        )
    return match["name"], *bounds


def selected(total: int, start: str, stop: str, split: str, seed: int | None) -> list[int]:
    """Row numbers of the range, in the order in which they are to be used."""
    first = _position(start, total) if start else 0
    end = _position(stop, total) if stop else total
    if not first < end <= total:
        raise ConfigError(
            f"data split {split!r}: the range is rows {first} to {end} (the end not included), but the split "
            f"holds {total} rows; it should start before it ends and end at {total} or before"
        )
    order = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
    return [int(index) for index in order[first:end]]


def _position(bound: str, total: int) -> int:
    """A row number, or a per cent of `total` rounded down, so that `[:x%]` and `[x%:]` meet."""
    match = _BOUND.fullmatch(bound)
    assert match is not None
    return int(match["row"]) if match["row"] else int(Fraction(match["percent"]) * total / 100)


def check_columns(keys: Mapping[str, str | None], table: Table, where: str) -> None:
    """Raises ConfigError unless there are rows and all of these columns: field of `data:` -> column, or None."""
    if not len(table.rows):
        raise ConfigError(f"{where}: holds no rows")
    for name, key in keys.items():
        if key is not None and key not in table.columns:
            columns = ", ".join(table.columns)
            raise ConfigError(f"data.{name}: no column {key!r} in {where}; the columns are {columns}")


def _texts(
    values: Sequence[Any],
    tokenizer: Any,
    config: DataConfig,
    where: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
) -> list[str]:
    """The prompts as text, rendered by the chat template when that is on."""
    columns = [f"{place}: column {config.input_key!r}" for place in where]
    if config.chat_template:
        messages = [messages_of(value, column) for value, column in zip(values, columns, strict=True)]
        values = render(messages, tokenizer, where, tools=tools)
    return [text_of(value, column) for value, column in zip(values, columns, strict=True)]


def text_of(value: Any, column: str) -> str:
    """The text in a column, with whose place errors begin. ConfigError if it is none."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{column} should hold text, got {type(value).__name__}; for chat messages set data.chat_template"
        )
    return sound(value, column)


def messages_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Chat messages, from text or from a list of messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    well_formed = isinstance(value, list) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value
    )
    if not value or not well_formed:
        raise ConfigError(
            f"{where} should hold text or a list of messages, each with a role and content, got "
            f"{shown(value)[:_SHOWN]}"
        )
    for at, message in enumerate(value):
        # Many a template would write a list of parts as Python does, and the run would train on that.
        if not isinstance(content := message["content"], str | None):
            raise ConfigError(f"{where}[{at}].content should be text, got {shown(content)[:_SHOWN]}")
    # Arrow gives every message all keys of all messages, with nulls that templates would take for values.
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _text_in(row: Mapping[str, Any], key: str | None, where: str, as_text: Callable[[Any], str]) -> str:
    """The value in a column as text; empty where there is none."""
    value = None if key is None else row[key]
    return "" if value is None else sound(as_text(value), f"{where}: column {key!r}")


def _plain(value: Any, where: str) -> Any:
    """The value as JSON has it. ConfigError if it cannot hold it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} holds what JSON cannot: {error}") from None
    return json.loads(sound(text, where))


def sound(text: str, where: str) -> str:
    """The text. ConfigError if it cannot be written as UTF-8: JSON allows halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(f"{where}: character {error.start}, {half}, is half of a character; remove it") from None
    return text


def _check_ids(prompt: Prompt, vocab_size: int | None, place: str) -> None:
    ids = prompt.prompt_ids
    if not len(ids):
        raise ConfigError(f"{place}: the prompt {prompt.text!r} has no tokens")
    if vocab_size is not None and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"{place}: the tokenizer gives id {int(ids.max())}, outside the policy's "
            f"vocabulary (0 to {vocab_size - 1}); use the tokenizer that belongs to the policy"
        )
