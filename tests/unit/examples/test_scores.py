"""The examples that score: the notebook, cell by cell, and the metric for lm-evaluation-harness."""

import ast
import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.reward_door import SEEN, reward_door, scorers_of_all_kinds
from tests.unit.scoring import Scored, served

EXAMPLES = Path(__file__).parents[3] / "examples"


def sums(prompt: str, response: str) -> Scored:
    return float("7" in response)


async def test_the_notebook_runs_from_its_first_cell_to_its_last(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")  # as Jupyter does
    notebook = json.loads((EXAMPLES / "scores.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    names: dict[str, Any] = {}
    async with served({"sums": sums}) as target:
        for cell in notebook["cells"]:
            source = "".join(cell["source"]).replace("127.0.0.1:19000", target)
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None)
                # As IPython does: `await` stands outside of a function.
                made = eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
                if inspect.iscoroutine(made):
                    await made
    assert Path.cwd() == tmp_path
    first, values, scored, by = capsys.readouterr().out.splitlines()
    assert first == f"sums function:sums {'h' * 12}"
    assert values == "[1. 0.] [1.]"
    assert scored == "score [1.0, 0.0] {}"
    assert by == f"scored by function:sums {'h' * 12}"


@pytest.fixture
async def metric(
    policy_folder: Path, reward_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ModuleType]:
    """The metric by the scorer `length`, which fails on the word w14."""
    from examples import lm_eval_hub

    async with reward_door(scorers_of_all_kinds(str(reward_folder), str(policy_folder))) as port:
        monkeypatch.setenv("QUARTET_HUB", f"http://127.0.0.1:{port}/reward/")
        monkeypatch.setenv("QUARTET_SCORER", "length")
        monkeypatch.setenv("QUARTET_TOKEN", "of no use where the port is open")
        yield lm_eval_hub


async def test_the_metric_is_a_number_or_an_error_and_never_a_number_for_no_score(metric: ModuleType) -> None:
    doc = {"question": "w5", "answer": "w7", "on": date(2026, 1, 2)}
    assert await asyncio.to_thread(metric.process_results, doc, ["w7 w8"]) == {"hub": 5.0}
    assert (SEEN[-1].prompt, SEEN[-1].label, SEEN[-1].columns["on"]) == ("w5", "w7", "2026-01-02")
    with pytest.raises(metric.UnscoredError, match=r"length: failed: .* raised OSError"):
        await asyncio.to_thread(metric.process_results, doc, ["w14"])


async def test_the_metric_has_a_number_for_each_named_score(
    metric: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc = {"question": "w5", "answer": ""}
    monkeypatch.setenv("QUARTET_SCORER", "two")
    assert await asyncio.to_thread(metric.process_results, doc, ["w7 w8"]) == {"hub_long": 5.0, "hub_words": 2.0}
    monkeypatch.setenv("QUARTET_SCORER", "none")
    with pytest.raises(RuntimeError, match="status 404"):
        await asyncio.to_thread(metric.process_results, doc, ["w7"])


async def test_a_hub_without_an_answer_is_named(metric: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")

    other = await asyncio.start_server(page, "127.0.0.1", 0)
    hub = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/reward"
    monkeypatch.setenv("QUARTET_HUB", hub)
    with pytest.raises(RuntimeError, match=f"^{hub}: no answer: "):  # but another program's page
        await asyncio.to_thread(metric.process_results, {"question": "w5", "answer": ""}, ["w7"])
    other.close()
    with pytest.raises(RuntimeError, match=f"^{hub}: no answer: .*refused"):
        await asyncio.to_thread(metric.process_results, {"question": "w5", "answer": ""}, ["w7"])
