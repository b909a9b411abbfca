"""Prompts: read from disk, checked, tokenised, and numbered in the order in which a run takes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.config.data import DataConfig
from orchestrator.data.rendering import render
from orchestrator.data.splits import Row, rows_of, sound
from quartet.config.base import ConfigError
from quartet.models.reading import reading
from quartet.wire.codec import Ints
from quartet.wire.pairs import label_of

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
    keys = {"input_key": config.input_key, "label_key": config.label_key, "task_key": config.task_key}
    rows = rows_of(config, split, keys | {f"columns.{index}": key for index, key in enumerate(config.columns)})
    where = f"data.path {config.path}, split {_name(split)!r}"
    texts = _texts(rows, tokenizer, config, tools)
    # A chat template writes the special tokens itself.
    with reading(f"the tokenizer of {tokenizer.name_or_path} fails on prompts of {where}"):
        token_ids = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
    labels, tasks = (
        [_text_in(row, key, as_text) for row in rows]
        for key, as_text in ((config.label_key, label_of), (config.task_key, str))
    )
    further = [{key: _plain(row, key) for key in config.columns} for row in rows]
    if len(different := {*tasks} - {""}) > MOST_TASKS:
        raise ConfigError(
            f"data.task_key: column {config.task_key!r} of {where} has {len(different)} different values, each of "
            f"which would be measured by itself; {MOST_TASKS} are the most"
        )
    prompts = [
        Prompt(row.number, np.asarray(ids, np.int32), text, label, task, columns)
        for row, text, ids, label, task, columns in zip(rows, texts, token_ids, labels, tasks, further, strict=True)
    ]
    for prompt, row in zip(prompts, rows, strict=True):
        _check_ids(prompt, vocab_size, row.place)
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
    names = [_name(name) for name, _ in (train, evaluation)]
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
        """`each` samples in a row have the same prompt."""
        self._prompts, self._seed, self._each = prompts, seed, each
        self._orders: dict[int, NDArray[np.int64]] = {}

    def dealt(self, number: int) -> Prompt:
        """The prompt of the sample with this number; numbers count from 0."""
        epoch, place = divmod(number // self._each, len(self._prompts))
        return self._prompts[int(self._epoch(epoch)[place])]

    def _epoch(self, number: int) -> NDArray[np.int64]:
        if number not in self._orders:
            if len(self._orders) > 1:  # two, for batches that cross the border between passes
                self._orders.clear()
            self._orders[number] = np.random.default_rng([self._seed, number]).permutation(len(self._prompts))
        return self._orders[number]


def _name(split: str) -> str:
    """A split without its range."""
    return split.partition("[")[0]


def _texts(rows: Sequence[Row], tokenizer: Any, config: DataConfig, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The prompts as text, rendered by the chat template when that is on."""
    key = config.input_key
    if not config.chat_template:
        return [row.text(key) for row in rows]
    texts = render([row.messages(key) for row in rows], tokenizer, [row.place for row in rows], tools=tools)
    return [sound(text, row.column(key)) for text, row in zip(texts, rows, strict=True)]


def _text_in(row: Row, key: str | None, as_text: Callable[[Any], str]) -> str:
    """The value in a column as text; empty where there is none."""
    if key is None or (value := row.values[key]) is None:
        return ""
    return sound(as_text(value), row.column(key))


def _plain(row: Row, key: str) -> Any:
    """The value in a column as JSON has it. ConfigError if it cannot hold it."""
    try:
        text = json.dumps(row.values[key], ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{row.column(key)} holds what JSON cannot: {error}") from None
    return json.loads(sound(text, row.column(key)))


def _check_ids(prompt: Prompt, vocab_size: int | None, place: str) -> None:
    ids = prompt.prompt_ids
    if not len(ids):
        raise ConfigError(f"{place}: the prompt {prompt.text!r} has no tokens")
    if vocab_size is not None and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"{place}: the tokenizer gives id {int(ids.max())}, outside the policy's "
            f"vocabulary (0 to {vocab_size - 1}); use the tokenizer that belongs to the policy"
        )
