"""Small files that stand for much memory or time: each is one line of error, within limits."""

import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from orchestrator.data import rendering, tables
from orchestrator.data.bounded import bounded
from orchestrator.data.prompts import load_prompts
from orchestrator.data.tables import open_split
from quartet.config.base import GIB, MIB, ConfigError
from tests.unit.orchestrator.data.test_prompts import config, fails, jsonl, tokenizer


def resident() -> int:
    """Most bytes of memory that this process or an ended child of it has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def endless() -> Iterator[int]:
    yield 1
    while True:
        pass


def greedy() -> Iterator[int]:
    yield len("a" * (2 * GIB))


def broken() -> Iterator[int]:
    yield 1
    raise KeyError("no such\nthing")


def ended() -> Iterator[int]:
    os.kill(os.getpid(), 9)
    yield 1


def deep() -> Iterator[int]:
    return deep()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (endless, "x: was not read within 0.5 s"),
        (greedy, "x: needs more than 0.25 GiB of memory to be read"),
        (broken, "x: KeyError: 'no such"),
        (ended, "x: the process that read it was ended by the system"),
        (deep, "x: RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_work_beyond_its_limits_is_one_line(work: Any, said: str) -> None:
    gc.collect()  # of tests before, whose files would be closed meanwhile
    begun, files, children = time.monotonic(), len(os.listdir("/proc/self/fd")), set(psutil.Process().children())
    with fails(said) as caught:
        list(bounded(work, "x", memory=GIB // 4, seconds=0.5 if work is endless else 60))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 30
    assert len(os.listdir("/proc/self/fd")) <= files
    assert set(psutil.Process().children()) <= children


def test_values_arrive_in_order_and_large_ones_whole() -> None:
    large = ["é" * (3 * MIB), {"a": [1, None, 0.5]}]
    assert list(bounded(lambda: iter([large, "b", []]), "x", memory=GIB, seconds=60)) == [large, "b", []]


class Foreign:
    """An object whose finalizer ends the process, except the one that made it: gRPC's crash in forks."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_fork_does_not_finalize_what_its_parent_left_to_be_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        Foreign()
        assert list(bounded(lambda: [gc.collect() >= 0], "x", memory=GIB, seconds=60)) == [True]
    finally:
        gc.enable()


ROWS = [{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'a' * 10**10 }}", "data.chat_template: needs more than 1 GiB of memory to be read"),
        ("{{ 'a' * (100 * 2**20) }}", "line 1: the chat template has written more than "),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "data.chat_template: was not read within 1.02 s",
        ),
        ("{{ 1 // 0 }}", "line 1: the chat template refuses the messages: "),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "line 1: the chat template refuses the messages: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "line 1: the chat template refuses the messages: "),
        ("{{ ''.__class__.__mro__ }}", "line 1: the chat template refuses the messages: "),
    ],
)
def test_chat_templates_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    """A template is a program that comes with a model."""
    monkeypatch.setattr(rendering, "LEAST_S", 1.0 if "range" in template else 60.0)
    before = resident()
    path = jsonl(tmp_path / "p.jsonl", ROWS)
    with fails(said) as caught:
        load_prompts(config(path, chat_template=True), tokenizer(template), "train")
    assert "\n" not in str(caught.value)
    assert resident() - before < GIB // 2


@pytest.fixture
def quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the memory for a file: beyond what this process has, and may have left unused."""
    monkeypatch.setattr(tables, "LEAST_MEMORY", tables.LEAST_MEMORY // 4)


@pytest.mark.usefixtures("quarter")
def test_a_parquet_file_that_stands_for_gibibytes(tmp_path: Path) -> None:
    """200 times one text of 16 MiB, by a dictionary: 3 GB from a few KiB."""
    path = tmp_path / "p.parquet"
    text = pyarrow.array(["a" * (16 * MIB)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200), text)
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": column}),
        path,
        compression="zstd",
        store_schema=False,
    )
    assert path.stat().st_size < 64 << 10
    before = resident()
    with fails(f"data.path {path}: needs "):
        open_split(str(path), "train")
    assert resident() - before < GIB // 2


def texts_of_a_dictionary() -> pyarrow.Array:
    """3 GB of texts."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 300_000), pyarrow.array(["a" * 10_000]))


def lists_of_nothing() -> pyarrow.Array:
    """800 MB of lists."""
    return pyarrow.ListArray.from_arrays(
        pyarrow.array(range(0, 100_000_001, 10_000_000), pyarrow.int32()), pyarrow.nulls(100_000_000)
    )


@pytest.mark.usefixtures("quarter")
@pytest.mark.parametrize("column", [texts_of_a_dictionary, lists_of_nothing])
def test_a_parquet_file_that_is_small_in_arrow_too(tmp_path: Path, column: Callable[[], pyarrow.Array]) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column()}), path, compression="zstd")
    assert path.stat().st_size < MIB
    before = resident()
    with fails(f"data.path {path}: needs more than 0.2"):
        open_split(str(path), "train")
    assert resident() - before < GIB // 2


def test_a_parquet_file_of_many_rows_of_nothing(tmp_path: Path) -> None:
    """Ten million nulls are a few KiB there, and gigabytes as rows of Python's."""
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.nulls(10_000_000, pyarrow.string())}), path)
    assert path.stat().st_size < MIB
    before = resident()
    with fails(f"data.path {path}: needs 1.23 GiB of memory, 1 GiB at most"):
        open_split(str(path), "train")
    assert resident() - before < GIB // 2


def test_parquet_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    for content in (b"", b"PAR1", b"PAR1" + b"\\xff" * 100 + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^data.path {path}: [^\n]+$"):
            open_split(str(path), "train")


def test_limits_leave_room_for_ordinary_files(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    texts = [f"prompt {row} " * 40 for row in range(20_000)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), path)
    assert [row["prompt"] for row in open_split(str(path), "train").rows] == texts
    assert tables.EXPANSION * path.stat().st_size + tables.LEAST_MEMORY > 20 * sum(map(len, texts))


def test_a_process_with_many_open_files_may_read() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        assert list(bounded(lambda: ["a"], "x", memory=GIB, seconds=60)) == ["a"]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
