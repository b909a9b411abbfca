"""The Python of pages that no other test walks from the first line to the last."""

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.environments.contract import Call, Results, Turn
from quartet.security.credentials import connect
from services.reward.client import RewardClient
from tests.unit.scoring import InThread, length

ROOT = Path(__file__).parents[3]
ADDRESS = "127.0.0.1:19000"


def python(page: str, words: str) -> str:
    """The only block of Python on a page that holds these words."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [block] = [each for each in blocks if words in each]
    return str(block)


def test_the_learner_takes_a_step_of_supervised_fine_tuning(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "policy").symlink_to(policy_folder)
    monkeypatch.chdir(tmp_path)
    rows = [np.asarray(ids, np.int32) for ids in ([5, 6], [7, 8, 9], [10], [11, 12])]
    names: dict[str, Any] = {"prompts": rows[:2], "answers": rows[2:]}
    exec(python("docs/learner.md", "Likelihood"), names)
    assert 0 < names["metrics"]["loss"] < 20
    assert names["metrics"]["skipped_steps"] == 0


def test_an_environment_answers_with_messages() -> None:
    names: dict[str, Any] = {"__name__": "my_file"}
    exec(python("docs/extend.md", "class Patient"), names)

    def answer(response: str) -> Any:
        turn = Turn(1, 0, 0, "What is 2 + 3?", "5", (response,), np.arange(4, dtype=np.int32), True)
        return names["Patient"]().answer(turn)

    assert answer("It is 6") == [{"role": "user", "content": "No. Try again."}]
    assert answer("It is 5") is None


def test_tools_carry_out_calls() -> None:
    names: dict[str, Any] = {"__name__": "my_file"}
    exec(python("docs/extend.md", "class Calculator"), names, names)

    def answer(**arguments: int) -> Any:
        calls = (Call("divide", arguments),)
        turn = Turn(1, 0, 0, "What is 7 / 2?", "3", ("",), np.arange(4, dtype=np.int32), True, calls)
        return asyncio.run(names["Calculator"]().answer(turn))

    said = {"role": "tool", "name": "divide"}
    assert answer(a=7, b=2) == Results([said | {"content": "3"}], wrong=0)
    assert answer(a=7, b=0) == Results([said | {"content": "error: division by zero"}], wrong=0)
    assert answer(a=7) == Results([said | {"content": "error: b: Missing required argument"}], wrong=1)


@pytest.mark.parametrize(
    ("page", "words", "expected"),
    [("README.md", "score_texts", len("A cat.")), ("docs/services.md", "score_conversations", len("Hello."))],
)
def test_a_client_scores_without_a_run(page: str, words: str, expected: int) -> None:
    names: dict[str, Any] = {"RewardClient": RewardClient, "connect": connect}
    with InThread({"taste": length}) as target:
        code = python(page, words).replace(ADDRESS, target)
        exec(f"async def main():\n{textwrap.indent(code, '    ')}\n    return scores", names)
        scores = asyncio.run(names["main"]())
    assert scores.values.tolist() == [expected]
