import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from orchestrator.data.tables import open_split
from quartet.config.base import ConfigError


def jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fails(message: str) -> Any:
    return pytest.raises(ConfigError, match=re.escape(message))


def test_every_kind_of_storage(tmp_path: Path) -> None:
    content = [{"prompt": "a", "label": 1}, {"prompt": "b b", "label": None}]
    dataset = Dataset.from_list(content)
    jsonl(tmp_path / "lines.jsonl", content)
    (tmp_path / "array.json").write_text(json.dumps(content))
    jsonl(tmp_path / "lines.json", content)
    dataset.to_parquet(tmp_path / "table.parquet")
    dataset.with_format("numpy").save_to_disk(tmp_path / "saved")
    for name in ("lines.jsonl", "array.json", "lines.json", "table.parquet", "saved"):
        table = open_split(str(tmp_path / name), "train")
        assert table.columns == ["prompt", "label"], name
        assert [dict(row) for row in table.rows] == content, name


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    for name, content in (("p.jsonl", '{"prompt": "a"}\r\n'), ("p.json", '[{"prompt": "a"}]')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert open_split(str(tmp_path / name), "train").rows == [{"prompt": "a"}]


def test_json_values_stay_as_written_and_columns_may_be_absent(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "p.jsonl", [{"a": "2024-05-01"}, {"b": 2}, {"a": 3.5}])
    table = open_split(str(data), "train")
    assert table.columns == ["a", "b"]
    assert table.rows == [{"a": "2024-05-01", "b": None}, {"a": None, "b": 2}, {"a": 3.5, "b": None}]
    text = "a\u2028b\x85c"  # which ends no line of JSON, though some readers end one there
    data.write_text(json.dumps({"a": text}, ensure_ascii=False))
    assert open_split(str(data), "train").rows == [{"a": text}]


def test_folders_hold_a_split_per_file_and_saved_dicts_theirs(tmp_path: Path) -> None:
    folder, saved = tmp_path / "folder", tmp_path / "saved"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [{"prompt": "a"}])
    Dataset.from_list([{"prompt": "b"}]).to_parquet(folder / "eval.parquet")
    (folder / "README.md").write_text("not data")
    splits = {"train": Dataset.from_list([{"prompt": "a"}]), "eval": Dataset.from_list([{"prompt": "b"}])}
    DatasetDict(splits).save_to_disk(saved)
    for path in (folder, saved):
        assert open_split(str(path), "train").rows[0] == {"prompt": "a"}
        assert open_split(str(path), "eval").rows[0] == {"prompt": "b"}
        with fails(f"data.path {path}: no split 'test'; the splits there are eval, train"):
            open_split(str(path), "test")


def test_the_parts_of_a_split_are_one_table(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "train-00000-of-00002.jsonl", [{"a": 1}, {"a": 2}])
    second = jsonl(tmp_path / "train-00001-of-00002.jsonl", [{"b": 3}, {"a": 4}])
    table = open_split(str(tmp_path), "train")
    assert table.rows == [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": None, "b": 3}, {"a": 4, "b": None}]
    places = [f"{file}, line {line}" for file in (first, second) for line in (1, 2)]
    assert [table.place(row) for row in range(4)] == places
    second.rename(tmp_path / "train-00000-of-00002.json")  # as many files, of which two are one part
    with fails("split 'train' has 1 of 2 parts; fetch it again"):
        open_split(str(tmp_path), "train")


def test_pipes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(saved)
    info = saved / "train" / "dataset_info.json"
    info.unlink()
    folder = tmp_path / "folder"
    folder.mkdir()
    cases = {tmp_path / "p.jsonl": tmp_path / "p.jsonl", info: saved}
    for name in ("train.jsonl", "eval.parquet"):
        cases[folder / name] = folder
    for pipe, path in cases.items():
        os.mkfifo(pipe)
        with fails(f"data.path: {pipe} is a pipe, socket or device; it should be a regular file"):
            open_split(str(path), "eval" if pipe.stem == "eval" else "train")


def test_paths_that_hold_no_data(tmp_path: Path) -> None:
    with fails(f"data.path: no such file or folder: {tmp_path / 'none.jsonl'}"):
        open_split(str(tmp_path / "none.jsonl"), "train")
    with fails(f"data.path {tmp_path}: holds no .jsonl, .json, .parquet file and no saved data set"):
        open_split(str(tmp_path), "train")
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    with fails("rows.csv: should end in one of .jsonl, .json, .parquet"):
        open_split(str(tmp_path / "rows.csv"), "train")
    (tmp_path / "rows.parquet").write_text("not parquet")
    with fails("rows.parquet: not valid Parquet"):
        open_split(str(tmp_path / "rows.parquet"), "train")
    jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    with fails("rows.jsonl and rows.parquet are both split 'rows'; keep one"):
        open_split(str(tmp_path), "rows")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "p.jsonl, line 3: not valid JSON"),
        ("p.jsonl", '{"prompt": "a"}\n"b"\n', "p.jsonl, line 2: should be a JSON object, got str"),
        ("p.json", '[{"prompt": "a"}, 7]', "p.json, element 2: should be a JSON object, got int"),
        ("p.json", '[{"prompt": "a"}', "p.json: not valid JSON"),
        ("p.json", '{\n"data": []\n}', "(column 2); each line should be an object, or all one array of objects"),
    ],
)
def test_files_that_are_not_json_objects(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with fails(message):
        open_split(str(tmp_path / name), "train")


@pytest.mark.parametrize("name", ["../../other.arrow", "/etc/hostname", "..", "", "a/b.arrow", None, 5])
def test_saved_data_sets_consist_of_their_own_files(tmp_path: Path, name: Any) -> None:
    """`datasets` would read whatever file they name."""
    saved = tmp_path / "saved"
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(saved)
    DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path / "dict")
    for folder, state in ((saved, saved / "state.json"), (tmp_path / "dict", tmp_path / "dict/train/state.json")):
        told = json.loads(state.read_text())
        state.write_text(json.dumps(told | {"_data_files": [{"filename": name}]}))
        with fails(f"data.path {state}: names {name!r}, which should be the name of a file beside it"):
            open_split(str(folder), "train")
    index = tmp_path / "dict" / "dataset_dict.json"
    index.write_text(json.dumps({"splits": [name]}))
    with fails(f"data.path {index}: names {name!r}"):
        open_split(str(tmp_path / "dict"), "train")


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.arrow", lambda file: file.write_bytes(file.read_bytes()[:-20])),
        ("*.arrow", lambda file: file.write_bytes(b"x" * 5000)),
        ("*.arrow", Path.unlink),
        ("dataset_info.json", lambda file: file.write_text("{")),
        ("dataset_info.json", lambda file: file.write_text("[]")),
        ("dataset_info.json", Path.unlink),
        ("state.json", lambda file: file.write_text("{}")),
    ],
)
def test_a_saved_data_set_that_is_damaged_is_named(
    tmp_path: Path, pattern: str, damage: Callable[[Path], object]
) -> None:
    alone, several = tmp_path / "alone", tmp_path / "several"
    data = Dataset.from_list([{"prompt": "a" * 50}] * 100)
    data.save_to_disk(alone)
    DatasetDict({"train": data}).save_to_disk(several)
    for path, folder in ((alone, alone), (several, several / "train")):
        [file] = folder.glob(pattern)
        damage(file)
        with pytest.raises(ConfigError, match=rf"^data.path {path}: the saved data set cannot be read: [^\n]+$"):
            open_split(str(path), "train")


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_that_cannot_be_decoded_is_one_line(tmp_path: Path, suffix: str) -> None:
    for text in ('[{"a": ' + "[" * 50_000 + "]" * 50_000 + "}]", '[{"a": ' + "9" * 5000 + "}]"):
        (tmp_path / f"p{suffix}").write_text(text if suffix == ".json" else text[1:-1])
        with pytest.raises(ConfigError, match=rf"^data.path {tmp_path}/p{suffix}[^\n]*: cannot be read: [^\n]+$"):
            open_split(str(tmp_path / f"p{suffix}"), "train")
