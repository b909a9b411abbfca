"""Tables of rows on disk: JSON, Parquet, or a data set saved by Hugging Face's `save_to_disk`."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from orchestrator.data.bounded import bounded
from quartet.config.base import GIB, MIB, ConfigError, check_regular, or_of_hub
from quartet.models.reading import reading

SUFFIXES = (".jsonl", ".json", ".parquet")
_PART = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:-[0-9a-f]{16})?")
"""Name of a file that holds a part of a split, as data sets of the Hugging Face hub have it."""
LEAST_MEMORY, EXPANSION = GIB, 64
"""Bytes that a Parquet file may take in memory: so many, and for each of its own bytes so many more."""
VALUE_BYTES = 64
"""Bytes that Python takes for each value of a table, apart from long texts."""
LEAST_S, SPEED = 60.0, 100 * MIB
"""Seconds in which a Parquet file has to be read: so many, and more at so many bytes of that memory a second."""


@dataclass(frozen=True, slots=True)
class Table:
    """One split, in the order in which it is stored."""

    columns: list[str]
    rows: Sequence[Mapping[str, Any]]
    """The rows; each has a value or None for every column."""
    place: Callable[[int], str]
    """The place of a row, from 0, in words: its file, and the line or the number in it."""


def open_split(path: str, name: str) -> Table:
    """The split `name` of the data at `path`.

    Raises:
        ConfigError: the path or the split does not exist, or the file cannot be read.
    """
    splits = _splits(Path(path))
    if name not in splits:
        existing = ", ".join(sorted(splits))
        raise ConfigError(f"data.path {path}: no split {name!r}; the splits there are {existing}")
    return splits[name]()


def split_names(path: str) -> list[str]:
    """The splits of the data at `path`, sorted. ConfigError if the path holds no data."""
    return sorted(_splits(Path(path)))


def _splits(path: Path) -> dict[str, Callable[[], Table]]:
    """Split name -> function that reads it."""
    if not path.exists():
        raise ConfigError(
            f"data.path: no such file or folder: {path} (looked for {path.resolve()})" + or_of_hub(str(path))
        )
    check_regular(path, "data.path")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"data.path {path}: should end in one of {', '.join(SUFFIXES)}")
        return {"train": partial(_read_file, path)}
    if (path / "dataset_dict.json").is_file():
        return {str(name): partial(_from_dataset, part, path / str(name)) for name, part in _load(path).items()}
    if (path / "state.json").is_file():
        return {"train": partial(_from_dataset, _load(path), path)}
    return _files(path)


def _files(folder: Path) -> dict[str, Callable[[], Table]]:
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in SUFFIXES and not file.name.startswith("."):
            part = _PART.fullmatch(file.stem)
            splits.setdefault(part["split"] if part else file.stem, []).append(file)
    if not splits:
        raise ConfigError(f"data.path {folder}: holds no {', '.join(SUFFIXES)} file and no saved data set")
    return {name: partial(_read_parts, _whole(folder, name, files)) for name, files in splits.items()}


def _whole(folder: Path, split: str, files: list[Path]) -> list[Path]:
    """The files of a split, in order. ConfigError unless it is one file, or all parts of one."""
    parts = [_PART.fullmatch(file.stem) for file in files]
    numbers = [(int(part["number"]), int(part["count"])) for part in parts if part]
    count = numbers[0][1] if numbers else 1
    if len(files) != count or (numbers and numbers != [(number, count) for number in range(count)]):
        names = " and ".join(file.name for file in files[:2])
        if not all(parts):
            raise ConfigError(f"data.path {folder}: {names} are both split {split!r}; keep one")
        there = len({*numbers})
        raise ConfigError(f"data.path {folder}: split {split!r} has {there} of {count} parts; fetch it again")
    return files


def _read_parts(files: Sequence[Path]) -> Table:
    tables = [_read_file(file) for file in files]
    columns = list(dict.fromkeys(column for table in tables for column in table.columns))
    if len(tables) == 1:
        return tables[0]
    starts = [0, *accumulate(len(table.rows) for table in tables)]

    def place(row: int) -> str:
        part = bisect_right(starts, row) - 1
        return tables[part].place(row - starts[part])

    rows = [{name: row.get(name) for name in columns} for table in tables for row in table.rows]
    return Table(columns, rows, place)


def _load(path: Path) -> Any:
    _check_names(path)
    import datasets  # here: it takes a sixth of all imports of `quartet train`, and JSON does not need it

    with reading(f"data.path {path}: the saved data set cannot be read"):
        return datasets.load_from_disk(str(path))


def _check_names(path: Path) -> None:
    """Raises ConfigError unless the saved data set consists of files and folders in its own folder."""
    splits = [path]
    if (index := path / "dataset_dict.json").is_file():
        splits = [path / name for name in _plain_names(index, _json_of(index).get("splits"))]
    for split in splits:
        for file in split.iterdir() if split.is_dir() else ():
            check_regular(file, "data.path")
        if (state := split / "state.json").is_file():
            files = _json_of(state).get("_data_files")
            named = [file.get("filename") if isinstance(file, dict) else file for file in files or ()]
            _plain_names(state, named)


def _json_of(file: Path) -> dict[str, Any]:
    found = _decode(_text_of(file), f"data.path {file}")
    if not isinstance(found, dict):
        raise ConfigError(f"data.path {file}: should be a JSON object, got {type(found).__name__}")
    return found


def _plain_names(file: Path, names: Any) -> list[str]:
    for name in names if isinstance(names, list) else [names]:
        if not (isinstance(name, str) and name == Path(name).name and name not in ("", "..")):
            raise ConfigError(f"data.path {file}: names {name!r}, which should be the name of a file beside it")
    return list(names)


def _from_dataset(dataset: Any, path: Path) -> Table:
    return Table(list(dataset.column_names), dataset.with_format(None), lambda row: f"{path}, row {row}")


def _read_file(path: Path) -> Table:
    check_regular(path, "data.path")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    rows, unit, numbers = _read_json(path)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    whole = [{column: row.get(column) for column in columns} for row in rows]
    return Table(columns, whole, lambda row: f"{path}, {unit} {numbers[row]}")


def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet  # type: ignore[import-untyped]  # here for the same reason

    memory = LEAST_MEMORY + EXPANSION * path.stat().st_size

    def readable() -> Iterator[int]:
        # Whatever the file says of its sizes. In threads there would be locks of this process's.
        try:
            table = pyarrow.parquet.read_table(path, use_threads=False)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(f"not valid Parquet: {error}") from None
        needed = table.nbytes + VALUE_BYTES * table.num_rows * (1 + table.num_columns)
        if needed > memory:
            raise ConfigError(f"needs {needed / GIB:.3g} GiB of memory, {memory / GIB:.3g} GiB at most")
        # Only the rows show what a dictionary's texts, or lists of nothing, take outside of Arrow.
        yield len(table.to_pylist())

    list(bounded(readable, f"data.path {path}", memory=memory, seconds=LEAST_S + memory / SPEED))
    table = pyarrow.parquet.read_table(path)
    return Table(table.column_names, table.to_pylist(), lambda row: f"{path}, row {row}")


def _read_json(path: Path) -> tuple[list[dict[str, Any]], str, list[int]]:
    """Reads an object per line or, in a .json file, also one array of objects; the rows, what each is called, and its
    number in the file.

    Does not use `datasets`, whose Arrow types would turn a label such as "2024-05-01" into a time.
    """
    text = _text_of(path)
    if path.suffix == ".json" and text.lstrip().startswith("["):
        numbered = list(enumerate(_decode(text, f"data.path {path}"), 1))
        unit = "element"
    else:
        unit = "line"
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        form = "; each line should be an object" + (", or all one array of objects" if path.suffix == ".json" else "")
        numbered = [(number, _decode(line, f"data.path {path}, line {number}", form)) for number, line in lines]
    for number, row in numbered:
        if not isinstance(row, dict):
            raise ConfigError(f"data.path {path}, {unit} {number}: should be a JSON object, got {type(row).__name__}")
    return [row for _, row in numbered], unit, [number for number, _ in numbered]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # as editors on Windows write it
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path {path}: should be text in UTF-8, but byte {error.start} is not") from None


def _decode(text: str, where: str, form: str = "") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} (column {error.colno}){form}") from None
    except (RecursionError, ValueError) as error:  # ValueError: a number of more digits than Python converts
        raise ConfigError(f"{where}: cannot be read: {error}") from None
