"""Evaluation: the rows, the file, the figures."""

import asyncio
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.algorithms.ppo import PPO
from orchestrator.algorithms.registry import parse
from orchestrator.data.prompts import Prompt
from orchestrator.evaluation.evaluator import Evaluator, evaluate_samples, summarise
from orchestrator.evaluation.results import EvaluatedSample, read_rows, write_rows
from orchestrator.experience.conversation import Conversation, trajectories
from orchestrator.experience.experience import Collected
from orchestrator.monitoring.metrics import judge_names
from quartet.config.base import ConfigError
from quartet.wire.pairs import Pair
from services.rollout.sample import FinishReason, Sample
from tests.models import BOS, EOS, PAD, make_tokenizer
from tests.unit.experiences import Experience, collected
from tests.unit.fakes import make_prompts, make_requests


def experience(row: int, ids: list[int], score: float) -> Experience:
    reason = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
    count = len(ids)
    sample = Sample(row, np.asarray(ids, np.int32), np.full(count, -1.0, np.float32), reason, ((1, 0, count),))
    return Experience(
        row, make_prompts(9)[row], sample, score, np.full(count, -1.25, np.float32), np.empty(0, np.float32)
    )


EXPERIENCES = [
    experience(0, [20, 21, EOS], 1.0),
    experience(1, [22, PAD, 23, 24], 2.0),
    experience(2, [EOS], 3.0),
]


def words(pairs: Sequence[Pair]) -> list[float]:
    return [len(pair.response.split()) for pair in pairs]


def right(pairs: Sequence[Pair]) -> Any:
    return np.asarray([pair.label == "1" and pair.prompt == "w11" and not pair.ended for pair in pairs], np.float32)


LIMIT_S = 60


async def judged() -> list[EvaluatedSample]:
    return await evaluate_samples(collected(EXPERIENCES), make_tokenizer(), {"words": words, "right": right}, LIMIT_S)


async def test_rows_hold_texts_scores_and_verdicts() -> None:
    assert (await judged())[1] == EvaluatedSample(
        row=1,
        prompt="w11",
        response="w22 w23 w24",
        label="1",
        ended=False,
        task="",
        score=2.0,
        scores={},
        kl=4 * 0.25,
        length=4,
        judges={"words": 3.0, "right": 1.0},
    )
    assert [row.response for row in (await judged())] == ["w20 w21", "w22 w23 w24", ""]
    assert [row.ended for row in (await judged())] == [True, False, True]


async def test_figures_with_their_intervals_by_hand() -> None:
    # Scores 1, 2, 3: mean 2, standard deviation 1, Student's t(0.975, 2) = 4.30265, so 2 +- 4.30265 / sqrt(3).
    # Words 2, 3, 0: standard deviation sqrt(7 / 3). Verdicts 0, 1, 0: sqrt(1 / 3).
    metrics = summarise(await judged())
    half = 4.30265 / 3**0.5
    assert metrics == pytest.approx(
        {
            "eval/score": 2,
            "eval/score_low": 2 - half,
            "eval/score_high": 2 + half,
            "eval/kl": 0.25 * (3 + 4 + 1) / 3,
            "eval/length": 8 / 3,
            "eval/truncated": 1 / 3,
            "eval/words": 5 / 3,
            "eval/words_low": 5 / 3 - half * (7 / 3) ** 0.5,
            "eval/words_high": 5 / 3 + half * (7 / 3) ** 0.5,
            "eval/right": 1 / 3,
            "eval/right_low": 1 / 3 - half * (1 / 3) ** 0.5,
            "eval/right_high": 1 / 3 + half * (1 / 3) ** 0.5,
        },
        abs=1e-4,
    )


async def test_without_a_reference_kl_is_not_measured(tmp_path: Path) -> None:
    without = [replace(e, ref_logprobs=np.empty(0, np.float32)) for e in EXPERIENCES]
    rows = await evaluate_samples(collected(without), make_tokenizer(), {"words": words}, LIMIT_S)
    assert summarise(rows).keys() == summarise(await judged()).keys() - {
        "eval/kl",
        "eval/right",
        "eval/right_low",
        "eval/right_high",
    }
    write_rows(tmp_path / "rows.jsonl", rows)
    assert [json.loads(line)["kl"] for line in (tmp_path / "rows.jsonl").open()] == [None] * 3
    assert all(math.isnan(row.kl) for row in read_rows(tmp_path / "rows.jsonl"))


async def test_judges_see_a_prompt_as_reward_functions_do_and_rows_as_it_was_written() -> None:
    """Without special tokens, such as those of a chat template."""
    seen: list[str] = []
    prompt = Prompt(0, np.asarray([BOS, 11, EOS, 12], np.int32), "<bos>w11<eos>w12", "")

    def judge(pairs: Sequence[Pair]) -> list[float]:
        seen.extend(pair.prompt for pair in pairs)
        return [0.0]

    [row] = await evaluate_samples(
        collected([replace(EXPERIENCES[0], prompt=prompt)]), make_tokenizer(), {"judge": judge}, LIMIT_S
    )
    assert (seen, row.prompt) == (["w11 w12"], "<bos>w11<eos>w12")


async def test_judges_see_the_parts_of_a_conversation() -> None:
    """One conversation with two responses, and one that ended with its first."""
    seen: list[Pair] = []

    def judge(pairs: Sequence[Pair]) -> list[float]:
        seen.extend(pairs)
        return [0.0] * len(pairs)

    request, other = make_requests(2)
    [first, last] = (experience(0, ids, 1.0).sample for ids in ([20, EOS], [22, 23, EOS]))
    two = Conversation.of(request).responded(first).answered(np.asarray([40, 41], np.int32)).responded(last)
    columns = trajectories([two, Conversation.of(other).responded(first)])
    batch = Collected(columns.with_rows(score=np.zeros(2, np.float32)), [request.prompt, other.prompt], 0.0, 0.0)
    rows = await evaluate_samples(batch, make_tokenizer(), {"judge": judge}, LIMIT_S)
    assert [pair.texts for pair in seen] == [("w20", "w40 w41", "w22 w23"), ()]
    assert [pair.response for pair in seen] == [row.response for row in rows] == ["w20 w40 w41 w22 w23", "w20"]
    assert [pair.last for pair in seen] == ["w22 w23", "w20"]
    assert [row.length for row in rows] == [5, 2]  # what was sampled


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ([1.0, 2.0], "evaluation.judges.gold: should give one finite number per pair, got 2 of which 2 finite for 3"),
        ([1.0, 2.0, float("nan")], "got 3 of which 2 finite for 3 pairs"),
    ],
)
async def test_judges_that_do_not_judge_are_named(verdict: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await evaluate_samples(collected(EXPERIENCES), make_tokenizer(), {"gold": lambda pairs: verdict}, LIMIT_S)


async def test_a_judge_that_hangs_is_named_and_nothing_else_waits_for_it() -> None:
    hangs, meanwhile = threading.Event(), asyncio.Event()

    def judge(pairs: Sequence[Pair]) -> list[float]:
        hangs.wait(LIMIT_S)
        return []

    asyncio.get_running_loop().call_soon(meanwhile.set)
    try:
        with pytest.raises(
            ConfigError, match=r"judges.gold: gave no verdict on 3 pairs within evaluation.judge_s \(0.05 s"
        ):
            await evaluate_samples(collected(EXPERIENCES), make_tokenizer(), {"gold": judge}, 0.05)
    finally:
        hangs.set()
    assert meanwhile.is_set()


async def test_a_judges_own_error_is_told_as_it_is() -> None:
    def judge(pairs: Sequence[Pair]) -> list[float]:
        raise TimeoutError("the judge's own server")

    with pytest.raises(TimeoutError, match=r"^the judge's own server$"):
        await evaluate_samples(collected(EXPERIENCES), make_tokenizer(), {"gold": judge}, LIMIT_S)


class FakeCollector:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def collect(self, prompts: Any, **options: Any) -> Collected:
        self.calls.append((prompts, options))
        return collected(EXPERIENCES, 1.0, 0.0)


async def test_an_evaluation_is_the_same_every_time_and_is_written_down(tmp_path: Path) -> None:
    collector, requests = FakeCollector(), make_requests(2)
    judges, folder = {"words": words}, tmp_path / "deep"
    evaluator = Evaluator(collector, requests, PPO(), make_tokenizer(), judges, LIMIT_S, folder)  # type: ignore[arg-type]
    expected = await evaluate_samples(collected(EXPERIENCES), make_tokenizer(), {"words": words}, LIMIT_S)
    metrics = [await evaluator.evaluate(step, version=step + 1) for step in (0, 30)]
    assert metrics[0] == metrics[1] == summarise(expected)
    assert collector.calls == [
        (requests, {"version": 1, "newest": 1, "critic_step": None}),
        (requests, {"version": 31, "newest": 31, "critic_step": None}),
    ]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["step-000000.jsonl", "step-000030.jsonl"]
    lines = (tmp_path / "deep" / "step-000030.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[2]) == {
        "row": 2,
        "prompt": "w12",
        "response": "",
        "label": "2",
        "ended": True,
        "task": "",
        "score": 3.0,
        "scores": {},
        "kl": 0.25,
        "length": 1,
        "judges": {"words": 0.0},
    }


async def test_named_scores_and_tasks_have_figures_of_their_own(tmp_path: Path) -> None:
    """Scores 1, 2, 3 of one name and 10, 10, 40 of another, with weights 2 and 0.5 by step 4: 7, 9, 26."""
    prompts = [replace(prompt, task=task) for prompt, task in zip(make_prompts(3), ("sums", "", "sums"), strict=True)]
    batch = collected([replace(each, prompt=prompts[each.number]) for each in EXPERIENCES])
    named = {"score/right": np.asarray([1, 2, 3], np.float32), "score/brief": np.asarray([10, 10, 40], np.float32)}
    batch = replace(batch, columns=batch.columns.without("score").with_rows(**named))
    rewards = {"right": {"weight": [[2, 1.0], [4, 2.0]]}, "brief": {"weight": 0.5}}
    algorithm = parse({"kind": "ppo", "rewards": rewards})

    class FakeCollector:
        async def collect(self, requests: Any, **versions: Any) -> Collected:
            return batch

    evaluator = Evaluator(FakeCollector(), [], algorithm, make_tokenizer(), {}, LIMIT_S, tmp_path)  # type: ignore[arg-type]
    metrics = await evaluator.evaluate(4, 5)
    assert metrics["eval/score"] == 14
    assert (metrics["eval/score/right"], metrics["eval/score/brief"]) == (2, 20)
    assert metrics["eval/score/right_low"] == pytest.approx(2 - 4.30265 / 3**0.5, abs=1e-4)
    assert metrics["eval/task/sums/score"] == 16.5
    assert not [name for name in metrics if name.startswith("eval/task/") and "/sums/" not in name]
    [_, row, _] = read_rows(tmp_path / "step-000004.jsonl")
    assert (row.task, row.score, row.scores) == ("", 9.0, {"right": 2.0, "brief": 10.0})
    # Before the first step with that step's weights, which are here those of step 2.
    assert (await evaluator.evaluate(0, 1))["eval/score"] == 12


async def test_samples_without_a_score_are_in_no_mean_and_null_in_the_file(tmp_path: Path) -> None:
    """Scores 1, none, 3: the mean is 2 by two prompts, and all samples have a length and a judge's verdict."""
    rows = [EXPERIENCES[0], replace(EXPERIENCES[1], score=math.nan), EXPERIENCES[2]]
    scored = await evaluate_samples(collected(rows), make_tokenizer(), {"words": words}, LIMIT_S)
    metrics = summarise(scored)
    assert (metrics["eval/score"], metrics["eval/unscored"]) == (2, 1)
    assert [metrics["eval/words"], metrics["eval/length"]] == pytest.approx([5 / 3, 8 / 3])
    assert all(math.isfinite(value) for value in metrics.values())
    assert judge_names(metrics) == ["words"]
    write_rows(tmp_path / "rows.jsonl", scored)
    assert [json.loads(line)["score"] for line in (tmp_path / "rows.jsonl").open()] == [1, None, 3]
    [_, row, _] = read_rows(tmp_path / "rows.jsonl")
    assert math.isnan(row.score)
    nothing = [replace(row, score=math.nan) for row in scored]
    assert summarise(nothing).keys() == metrics.keys() - {"eval/score", "eval/score_low", "eval/score_high"}
