"""RewardBench by the HTTP door, with the reward service's own replicas behind it."""

import asyncio
import io
import json
import shutil
import sys
from collections.abc import AsyncIterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import OpenerDirector, Request

import pytest

from examples.lm_eval_hub import UnscoredError
from examples.rewardbench_door import SECTIONS, evaluate, main
from tests.cluster import TEMPLATE
from tests.unit.reward_door import reward_door, scorers_of_all_kinds

# By the scorer `length` the longer one of two responses wins.
ROWS = [
    {"prompt": "w5", "chosen": "w20 w21", "rejected": "w20", "subset": "mt-bench-easy"},
    {"prompt": "w5", "chosen": "w20", "rejected": "w21", "subset": "mt-bench-easy"},
    {"prompt": "w6", "chosen": "w20 w21 w22", "rejected": "w20", "subset": "alpacaeval-hard"},
    {"prompt": "w6", "chosen": "w20", "rejected": "w20 w21", "subset": "hep-go"},
    {"prompt": "w7", "chosen": "w20 w21", "rejected": "w20", "subset": "of my own"},
]


@pytest.fixture
async def door(policy_folder: Path, reward_folder: Path, tmp_path: Path) -> AsyncIterator[str]:
    """The door's address; its tokenizer has a chat template."""
    tokenizer = tmp_path / "policy"
    shutil.copytree(policy_folder, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    async with reward_door(scorers_of_all_kinds(str(reward_folder), str(tokenizer))) as port:
        yield f"http://127.0.0.1:{port}/reward"


async def test_subsets_and_sections_by_hand(door: str) -> None:
    found = await asyncio.to_thread(evaluate, ROWS * 20, door, "length", None)
    assert found["rows"] == 100
    assert found["subsets"] == {"mt-bench-easy": 0.5, "alpacaeval-hard": 1.0, "hep-go": 0.0, "of my own": 1.0}
    assert found["sections"] == {"Chat": pytest.approx((28 * 0.5 + 95 * 1.0) / (28 + 95)), "Reasoning": 0.0}
    assert sum(len(subsets) for subsets in SECTIONS.values()) == 23


async def test_a_response_without_a_score_is_not_lost_but_ends_the_evaluation(door: str) -> None:
    unscored: Any = ROWS[0] | {"rejected": "w14"}
    with pytest.raises(UnscoredError, match="failed: "):
        await asyncio.to_thread(evaluate, [*ROWS, unscored], door, "length", None)
    with pytest.raises(RuntimeError, match="status 4"):
        await asyncio.to_thread(evaluate, ROWS, door, "not there", None)
    with pytest.raises(RuntimeError, match="--scorer: gives long, words"):
        await asyncio.to_thread(evaluate, ROWS, door, "two", None)


async def test_a_door_that_is_busy_is_asked_again(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    begin = OpenerDirector.open

    def busy_at_first(opener: OpenerDirector, request: Request, **options: Any) -> Any:
        opened.append(request.full_url)
        if len(opened) < 3:
            headers = Message()
            headers["retry-after"] = "0.01"
            raise HTTPError(request.full_url, (429, 503)[len(opened) - 1], "busy", headers, io.BytesIO(b"busy"))
        return begin(opener, request, **options)

    monkeypatch.setattr(OpenerDirector, "open", busy_at_first)
    found = await asyncio.to_thread(evaluate, ROWS, door, "length", None)
    assert (found["rows"], opened) == (5, [f"{door}/v1/rewards"] * 3)


async def test_the_program_prints_json(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(sys, "argv", ["rewardbench_door", str(tmp_path / "rows.jsonl"), door, "--scorer", "length"])
    await asyncio.to_thread(main)
    assert json.loads(capsys.readouterr().out)["rows"] == 5
