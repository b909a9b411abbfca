"""The examples that score: the notebook, cell by cell, and the metric for lm-evaluation-harness."""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quartet.wire.outcomes import Outcome, Unscored
from tests.unit.scoring import InThread, Scored, served

EXAMPLES = Path(__file__).parents[3] / "examples"


def sums(prompt: str, response: str) -> Scored:
    return float("7" in response)


async def test_the_notebook_runs_from_its_first_cell_to_its_last(capsys: pytest.CaptureFixture[str]) -> None:
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
    first, values, scored, by = capsys.readouterr().out.splitlines()
    assert first == f"sums function:sums {'h' * 12}"
    assert values == "[1. 0.] [1.]"
    assert scored == "score [1.0, 0.0] {}"
    assert by == f"scored by function:sums {'h' * 12}"


def half(prompt: str, response: str) -> Scored:
    return Unscored(Outcome.TIMEOUT, "too slow") if response == "slow" else float(len(response))


@pytest.fixture
def metric(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    from examples import lm_eval_hub

    with InThread({"half": half, "both": lambda prompt, response: {"a": 1.0, "b": 2.0}}) as target:
        monkeypatch.setenv("QUARTET_HUB", target)
        monkeypatch.setenv("QUARTET_SCORER", "half")
        yield lm_eval_hub
        lm_eval_hub._loop().run(lm_eval_hub._client().close())
        lm_eval_hub._loop().close()
        lm_eval_hub._client.cache_clear()
        lm_eval_hub._loop.cache_clear()


def test_the_metric_is_a_number_or_an_error_and_never_a_number_for_no_score(metric: ModuleType) -> None:
    doc = {"question": "6 + 1 =", "answer": "7", "id": 3}
    assert metric.process_results(doc, ["seven"]) == {"hub": 5.0}
    assert metric.process_results(doc, ["7"]) == {"hub": 1.0}
    with pytest.raises(metric.UnscoredError, match="function:half: timeout: too slow"):
        metric.process_results(doc, ["slow"])


def test_the_metric_has_a_number_for_each_named_score(metric: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_SCORER", "both")
    assert metric.process_results({"question": "q", "answer": ""}, ["x"]) == {"hub_a": 1.0, "hub_b": 2.0}
