"""`quartet score`: rows in order, in flat memory; interrupted, and continued."""

import asyncio
import fcntl
import gc
import io
import json
import os
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.score import Tally, score, score_file
from orchestrator.evaluation.hub import Hub, Verdict
from orchestrator.evaluation.rows import Row
from quartet.config.base import ConfigError
from quartet.wire.errors import Unavailable
from tests.unit.scoring import Service, length, read, right, write


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "response": "x" * (number % 7), "source": number} for number in range(count)]


async def run(path: Path, output: Path, service: Service, *names: str, **options: Any) -> list[str]:
    said: list[str] = []
    await score_file(path, output, lambda: service.hub(*names), said.append, **options)
    return said


async def test_rows_come_out_in_order_with_all_that_was_in_them(tmp_path: Path) -> None:
    given = [*rows(1500), {"prompt": "last", "response": "?"}]
    path, output = write(tmp_path / "in.jsonl", *given), tmp_path / "sub/out.jsonl"
    service = Service({"length": length, "right": right})
    said = await run(path, output, service, "length", "right")
    written = read(output)
    assert [{name: row[name] for name in before} for row, before in zip(written, given, strict=True)] == given
    assert [row["scores"]["length"] for row in written[:-1]] == [float(number % 7) for number in range(1500)]
    assert written[-1]["scores"] == {"length": None, "right": 0.0}
    assert written[-1]["outcomes"] == {"length": "not_applicable", "right": "scored"}
    assert written[-1]["reasons"] == {"length": "a question"}
    assert written[0]["scorers"]["length"] == {"name": "function:length", "hash": "h" * 64}
    assert said == [
        "length (function:length hhhhhhhhhhhh): 1500 scored, 1 not applicable (line 1501: a question)",
        "right (function:right hhhhhhhhhhhh): 1501 scored",
        f"1501 rows are in {output}",
    ]
    assert service.closed


async def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """Shells write `<(zcat rows.jsonl.gz)` as the name of a pipe."""
    pipe, output = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    text = "".join(json.dumps(row) + "\n" for row in rows(100))
    writing = asyncio.create_task(asyncio.to_thread(pipe.write_text, text))
    said = await run(pipe, output, Service({"length": length}))
    await writing
    assert said[-1] == f"100 rows are in {output}"
    assert [row["source"] for row in read(output)] == [*range(100)]


async def test_slow_batches_do_not_change_the_order() -> None:
    class Uneven(Hub):
        async def score(self, rows: Sequence[Row], responses: Sequence[str]) -> list[Verdict]:
            await asyncio.sleep(0.02 if rows[0].line == 1 else 0)
            return [Verdict({"a": float(row.line)}, {"a": "scored"}) for row in rows]

    given = b"".join(json.dumps({"prompt": "", "response": ""}).encode() + b"\n" for _ in range(2000))
    out = io.BytesIO()
    hub = Uneven(Service({}), {}, 1)  # type: ignore[arg-type]
    tally = await score(io.BytesIO(given), "in", hub, out.write)
    assert [json.loads(line)["scores"]["a"] for line in out.getvalue().splitlines()] == [*range(1, 2001)]
    assert (tally.rows, tally.unscored) == (2000, 0)


async def test_an_interrupted_command_goes_on_where_it_was(tmp_path: Path) -> None:
    path, output = write(tmp_path / "in.jsonl", *rows(1000)), tmp_path / "out.jsonl"
    whole = tmp_path / "whole.jsonl"
    await run(path, whole, Service({"length": length}))
    service = Service({"length": length})
    # 300 rows are done; the write of the next one was cut off in the middle.
    lines = whole.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:300]) + lines[300][:40])
    said = await run(path, output, service)
    assert output.read_bytes() == whole.read_bytes()
    assert sum(len(prompts) for _, prompts in service.asked) == 1 + 700 - 1
    assert said[-1] == f"1000 rows are in {output}"
    assert said[0].endswith(": 1000 scored")
    # A finished one asks for nothing more.
    again = Service({"length": length})
    await run(path, output, again)
    assert again.asked == []


async def test_a_hub_that_fails_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path, output = write(tmp_path / "in.jsonl", *rows(3000)), tmp_path / "out.jsonl"
    service, calls = Service({"length": length}), 0

    def failing(prompt: str, response: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 1500:
            raise Unavailable("gone")
        return float(len(response))

    service.judges["length"] = failing
    with pytest.raises(ExceptionGroup):
        await run(path, output, service)
    assert 0 < len(read(output)) < 3000
    await run(path, output, Service({"length": length}))
    assert [row["source"] for row in read(output)] == [*range(3000)]


async def test_batches_that_fail_behind_one_that_fails_end_with_it_and_are_told_once(complaints: list[Any]) -> None:
    working = 0

    class Failing(Hub):
        async def score(self, rows: Sequence[Row], responses: Sequence[str]) -> list[Verdict]:
            nonlocal working
            working += 1
            try:
                first, last = rows[0].line == 1, rows[0].line > 200
                await asyncio.sleep(60 if last else 0.05 if first else 0)
                raise Unavailable("gone")
            finally:
                working -= 1

    given = b"".join(json.dumps({"prompt": "", "response": ""}).encode() + b"\n" for _ in range(320))
    with pytest.raises(Unavailable):
        await score(io.BytesIO(given), "in", Failing(Service({}), {}, 1), len)  # type: ignore[arg-type]
    assert working == 0
    gc.collect()
    assert complaints == []


async def test_an_output_of_other_rows_or_of_another_scorer_is_not_continued(tmp_path: Path) -> None:
    path, output = write(tmp_path / "in.jsonl", *rows(5)), tmp_path / "out.jsonl"
    await run(path, output, Service({"length": length}))
    before = output.read_bytes()
    other = write(tmp_path / "other.jsonl", *rows(3), {"prompt": "p3", "response": "changed"}, *rows(9))
    with pytest.raises(ConfigError, match=f"{output}, line 4: is not of {other}, line 4; "):
        await run(other, output, Service({"length": length}))
    with pytest.raises(ConfigError, match=f"{output}, line 4: is not of {tmp_path / 'short.jsonl'}; "):
        await run(write(tmp_path / "short.jsonl", *rows(3)), output, Service({"length": length}))
    with pytest.raises(ConfigError, match=r"line 1: scorer length was function:length hhhh.* and is .* kkkk.* now"):
        await run(path, output, Service({"length": length}, {"length": "k" * 64}))
    with pytest.raises(ConfigError, match="line 1: scorer right was not asked"):
        await run(path, output, Service({"right": right}))
    assert output.read_bytes() == before
    await run(path, output, Service({"right": right}), overwrite=True)
    assert [*read(output)[0]["scores"]] == ["right"]


async def test_a_wrong_row_is_named_and_those_before_it_are_written(tmp_path: Path) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(path, *rows(400), {"prompt": "p", "response": 3}, *rows(2))
    with pytest.raises(ConfigError, match=f"^{path}, line 401: response: should be text, got 3$"):
        await run(path, output, Service({"length": length}))
    assert len(read(output)) == 400
    write(path, *rows(400), {"prompt": "p"}, *rows(2))
    with pytest.raises(ConfigError, match=f"^{path}, line 401: response: required$"):
        await run(path, output, Service({"length": length}))
    write(path, *rows(400), {"prompt": "p", "response": "3"}, *rows(2))
    await run(path, output, Service({"length": length}))
    assert len(read(output)) == 403


async def test_an_input_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *rows(1))
    with pytest.raises(ConfigError, match=r"in\.jsonl is the input; name another file"):
        await run(path, path, Service({"length": length}))
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: no such file")):
        await run(tmp_path, tmp_path / "out.jsonl", Service({"length": length}))


async def test_two_commands_do_not_write_one_output(tmp_path: Path) -> None:
    path, output = write(tmp_path / "in.jsonl", *rows(3)), tmp_path / "out.jsonl"
    with output.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=r"out\.jsonl: another command is writing it"):
                await run(path, output, Service({"length": length}), overwrite=overwrite)
    await run(path, output, Service({"length": length}))
    assert len(read(output)) == 3


async def test_memory_does_not_grow_with_the_file() -> None:
    class Endless(io.RawIOBase):
        def __init__(self, count: int) -> None:
            self.left = count

        def readline(self, size: Any = -1, /) -> bytes:
            self.left -= 1
            return (
                json.dumps({"prompt": "p" * 300, "response": "r" * 300}).encode() + b"\n" if self.left >= 0 else b""
            )

    class Instant(Hub):
        async def score(self, rows: Sequence[Row], responses: Sequence[str]) -> list[Verdict]:
            return [Verdict({"a": 1.0}, {"a": "scored"}) for _ in rows]

    async def peak(count: int) -> int:
        hub = Instant(Service({}), {}, 1)  # type: ignore[arg-type]
        tracemalloc.start()
        tally = await score(Endless(count), "in", hub, len)  # type: ignore[arg-type]
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert tally.rows == count
        return most

    few = await peak(2_000)
    assert await peak(6_000) < 1.2 * few


def test_a_tally_has_each_scorers_first_reason() -> None:
    tally = Tally()
    row = Row(7, {}, "p", (), "r")
    tally.add(row, Verdict({}, {"a": "failed", "b": "scored"}, {"a": "why"}))
    tally.add(row, Verdict({}, {"a": "timeout", "b": "scored"}, {"a": "later"}))
    assert (tally.rows, tally.unscored, tally.first) == (2, 2, {"a": "line 7: why"})
