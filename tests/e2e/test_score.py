"""`quartet score` and `quartet evaluate` of rows, against the reward service of a quartet that runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster import Quartet
from tests.commands import PATIENCE_S, Command
from tests.unit.scoring import read, write

PROMPTS = [{"prompt": f"w{5 + number} w6", "source": "even" if number % 2 == 0 else "odd"} for number in range(6)]


def ran(quartet: Quartet, folder: Path, *arguments: str) -> str:
    """Output of the command, which must end well."""
    log = folder / "command.log"
    code = Command(folder, log, *arguments, "--hub", quartet.target, OPENAI_API_KEY=quartet.token).wait(PATIENCE_S)
    assert code == 0, log.read_text()
    return log.read_text()


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


async def test_a_file_gets_the_scores_that_a_client_gets(quartet: Quartet, tmp_path: Path) -> None:
    rows = [row | {"response": f"w7 w{8 + number}"} for number, row in enumerate(PROMPTS)]
    write(tmp_path / "rows.jsonl", *rows)
    said = ran(quartet, tmp_path, "score", "rows.jsonl", "--output", "scored.jsonl")
    expected = await quartet.services.reward.score_texts(
        [row["prompt"] for row in rows], [row["response"] for row in rows], timeout_s=60
    )
    scored = read(tmp_path / "scored.jsonl")
    assert [row["scores"]["score"] for row in scored] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert [row["source"] for row in scored] == [row["source"] for row in rows]
    assert {row["scorers"]["score"]["hash"] for row in scored} == {expected.model_hash}
    assert f"score ({expected.scorer} {expected.model_hash[:12]}): 6 scored" in said


async def test_the_deployed_policy_is_evaluated_by_its_own_endpoint(quartet: Quartet, tmp_path: Path) -> None:
    write(tmp_path / "prompts.jsonl", *PROMPTS)
    endpoint = f"http://127.0.0.1:{quartet.http}/rollout/v1"
    sampling = ["--samples", "3", "--max-tokens", "8", "--seed", "7", "--by", "source", "--pass-at", "2"]
    asked = ["evaluate", "prompts.jsonl", "--endpoint", endpoint, *sampling]
    ran(quartet, tmp_path, *asked, "--output", "first")
    rows = read(tmp_path / "first/rows.jsonl")
    assert len(rows) == 18
    assert all(len(row["response"].split()) <= 8 for row in rows)
    assert all(row["policy_version"] >= 0 and row["outcomes"] == {"score": "scored"} for row in rows)
    means = [np.mean([row["scores"]["score"] for row in rows[at : at + 3]]) for at in range(0, 18, 3)]
    figures = summary(tmp_path / "first")["figures"]
    assert [figure["group"] for figure in figures] == ["", "source=even", "source=odd"]
    assert figures[0]["mean"]["mean"] == pytest.approx(np.mean(means), abs=1e-5)
    # The same seeds give the same responses, and scores that differ by rounding, as the batches do.
    ran(quartet, tmp_path, *asked, "--output", "second", "--against", "first")
    again = read(tmp_path / "second/rows.jsonl")
    assert [row["response"] for row in again] == [row["response"] for row in rows]
    assert [row["scores"]["score"] for row in again] == pytest.approx(
        [row["scores"]["score"] for row in rows], abs=1e-5
    )
    assert summary(tmp_path / "second")["figures"][0]["against"]["prompts"] == 6
    # Nothing is asked again, so that nobody wins.
    ran(quartet, tmp_path, *asked, "--output", "first", "--against", "first")
    compared = summary(tmp_path / "first")["figures"][0]["against"]
    assert (compared["win_rate"]["mean"], compared["ties"], compared["sign_test_p"]) == (0.5, 6, 1.0)


@pytest.mark.exhaustive  # starts an engine; a folder's prompts and answers: tests/unit/orchestrator/commands
async def test_a_models_folder_is_evaluated_by_an_engine_of_its_own(quartet: Quartet, tmp_path: Path) -> None:
    write(tmp_path / "prompts.jsonl", *PROMPTS)
    engine = ["--field", "kv_cache_mib=64", "--field", "max_length=64", "--timeout-s", "200"]
    asked = ["evaluate", "prompts.jsonl", "--model", str(quartet.policy), "--max-tokens", "8", *engine]
    ran(quartet, tmp_path, *asked, "--output", "out")
    assert summary(tmp_path / "out")["figures"][0]["scored"] == 6
    assert all(row["ended"] is not None for row in read(tmp_path / "out/rows.jsonl"))
