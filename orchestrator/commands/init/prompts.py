"""A user's prompts: their columns, splits and lengths, found by reading them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.data import DataConfig
from orchestrator.data.prompts import load_prompts
from orchestrator.data.tables import Table, open_split, split_names
from quartet.config.base import ConfigError
from quartet.wire.identity import vocabulary_size

INPUTS = ("prompt", "messages", "question", "instruction", "input", "text")
"""Usual names of the prompt's column; the first that exists is taken."""
LABELS = ("label", "answer", "target", "ground_truth", "solution")
"""Usual names of the label's column."""
HELD_OUT = ("eval", "validation", "test")
"""Usual names of the split for evaluation."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Columns, splits and lengths of a user's prompts."""

    input_key: str
    label_key: str | None
    chat_template: bool
    train: str
    """The split to train on, with a range if the rest of it is held out."""
    held_out: str | None
    """The split to evaluate on; None if there are too few prompts."""
    count: int
    """Number of prompts to train on."""
    shortest: int
    """Tokens of the shortest prompt."""
    longest: int
    """Tokens of the longest prompt."""
    evaluated: int
    """Number of prompts to evaluate on; 0 without such a split."""

    @property
    def shuffled(self) -> bool:
        """True if both are ranges of one split, which may be sorted and is therefore shuffled."""
        return "[" in self.train


def look_at(path: str, tokenizer: Any, input_key: str | None = None, label_key: str | None = None) -> Prompts:
    """Reads the prompts at `path`. ConfigError, which names the flag, if they cannot be used."""
    try:
        names = split_names(path)
        split = "train" if "train" in names else names[0]
        if split != "train" and len(names) > 1:
            raise ConfigError(f"has the splits {', '.join(names)}; the one to train on should be called train")
        table = open_split(path, split)
        if not len(table.rows):
            raise ConfigError(f"split {split!r} holds no rows")
        key = _column(table, input_key, "--input-key", INPUTS, _only_text(table))
        if key is None:
            raise ConfigError(f"which column is the prompt? Name it by --input-key: {', '.join(table.columns)}")
        # The prompt itself is nobody's label, unless that is said.
        label = _column(table, label_key, "--label-key", [name for name in LABELS if name != key], None)
        chat = bool(tokenizer.chat_template) or isinstance(table.rows[0][key], list)
        reading = DataConfig(path=path, input_key=key, label_key=label, chat_template=chat, max_prompt_length=1 << 30)
        prompts = load_prompts(reading, tokenizer, split, vocab_size=vocabulary_size(tokenizer)).prompts
    except ConfigError as error:
        raise ConfigError(f"--prompts: {error}") from None
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    bounds = min(lengths), max(lengths)
    apart = next((name for name in HELD_OUT if name in names), None)
    if apart is None and len(prompts) > 1:
        first = len(prompts) * 9 // 10
        rest = len(prompts) - first
        return Prompts(key, label, chat, f"{split}[:90%]", f"{split}[90%:]", first, *bounds, rest)
    evaluated = len(open_split(path, apart).rows) if apart else 0
    return Prompts(key, label, chat, split, apart, len(prompts), *bounds, evaluated)


def _column(table: Table, given: str | None, flag: str, usual: Sequence[str], other: str | None) -> str | None:
    if given is not None and given not in table.columns:
        raise ConfigError(f"{flag}: no column {given!r}; the columns are {', '.join(table.columns)}")
    return given or next((name for name in usual if name in table.columns), other)


def _only_text(table: Table) -> str | None:
    texts = [name for name in table.columns if isinstance(table.rows[0][name], str)]
    return texts[0] if len(texts) == 1 else None
