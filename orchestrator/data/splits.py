"""Rows of a split: chosen, and their values checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from orchestrator.config.data import SplitsConfig
from orchestrator.data.tables import Table, open_split
from quartet.config.base import ConfigError
from quartet.config.explain import excerpt

Messages = list[dict[str, Any]]
_LARGEST = float(np.finfo(np.float32).max)
"""Largest number that a row's column may hold."""
_RANGE = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\])?")
_BOUND = re.compile(r"(?P<row>\d+)|(?P<percent>100|\d{1,2}(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a split."""

    number: int
    """Row in the split as stored, from 0."""
    place: str
    """File and line, with which errors about the row begin."""
    values: Mapping[str, Any]
    """Value by column."""

    def text(self, key: str) -> str:
        """The text in a column. ConfigError, which names place and column, if it holds something else."""
        value, column = self.values[key], self.column(key)
        if not isinstance(value, str):
            messages = "; for chat messages set data.chat_template" if isinstance(value, list) else ""
            raise ConfigError(f"{column} should hold text, got {excerpt(value)}{messages}")
        return sound(value, column)

    def messages(self, key: str, role: str = "user") -> Messages:
        """The chat messages in a column; text is one message of that role. ConfigError as for `text`."""
        value, column = self.values[key], self.column(key)
        if isinstance(value, str):
            return [{"role": role, "content": sound(value, column)}]
        well_formed = isinstance(value, list) and all(
            isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value
        )
        if not value or not well_formed:
            raise ConfigError(
                f"{column} should hold text or a list of messages, each with a role and content, got {excerpt(value)}"
            )
        for at, message in enumerate(value):
            # Many a template would write a list of parts as Python does, and the run would train on that.
            if not isinstance(content := message["content"], str | None):
                raise ConfigError(f"{column}[{at}].content should be text, got {excerpt(content)}")
        # Arrow gives every message all keys of all messages, with nulls that templates would take for values.
        return [{key: part for key, part in message.items() if part is not None} for message in value]

    def number_in(self, key: str) -> float:
        """The number in a column. ConfigError as for `text`."""
        value = self.values[key]
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            return float(value)
        raise ConfigError(f"{self.column(key)} should hold a finite number, got {value!r:.40}")

    def column(self, key: str) -> str:
        """Place and column, with which errors about a value begin."""
        return f"{self.place}: column {key!r}"


def rows_of(config: SplitsConfig, split: str, keys: Mapping[str, str | None]) -> list[Row]:
    """The rows of a split.

    Args:
        config: the data.
        split: its name, with a range of rows such as `[:90%]` if wanted.
        keys: field of `data:` -> column that has to be there, or None.

    Raises:
        ConfigError: the path, the split, its range or a column does not exist, or a file is damaged.
    """
    name, start, stop = _parsed(split)
    table = open_split(config.path, name)
    _check_columns(keys, table, f"data.path {config.path}, split {name!r}")
    chosen = _selected(len(table.rows), start, stop, split, config.split_seed)
    return [Row(index, table.place(index), table.rows[index]) for index in chosen]


def _parsed(split: str) -> tuple[str, str, str]:
    """`train[:90%]` -> ("train", "", "90%")."""
    match = _RANGE.fullmatch(split)
    bounds = (match["start"] or "", match["stop"] or "") if match else ("", "")
    if not match or any(bound and not _BOUND.fullmatch(bound) for bound in bounds):
        raise ConfigError(
            f"data split {split!r}: should be a name, or a name with a range of row numbers from 0 up or of "
            "percentages up to 100%: train, train[100:200], train[500:], train[:90%]"
        )
    return match["name"], *bounds


def _selected(total: int, start: str, stop: str, split: str, seed: int | None) -> list[int]:
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


def _check_columns(keys: Mapping[str, str | None], table: Table, where: str) -> None:
    """Raises ConfigError unless there are rows and all of these columns: field of `data:` -> column, or None."""
    if not len(table.rows):
        raise ConfigError(f"{where}: holds no rows")
    for name, key in keys.items():
        if key is not None and key not in table.columns:
            columns = ", ".join(table.columns)
            raise ConfigError(f"data.{name}: no column {key!r} in {where}; the columns are {columns}")


def sound(text: str, where: str) -> str:
    """The text. ConfigError if it cannot be written as UTF-8: JSON allows halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(f"{where}: character {error.start}, {half}, is half of a character; remove it") from None
    return text
