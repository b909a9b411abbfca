"""Evaluation on held-out prompts, scored by the deployed reward service and by judges."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.algorithms.contract import Algorithm
from orchestrator.evaluation.intervals import over_known
from orchestrator.evaluation.judges import Judge, verdicts
from orchestrator.evaluation.results import EvaluatedSample, write_rows
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected, scores_of
from orchestrator.experience.requests import SampleRequest
from quartet.columns import Columns
from quartet.wire.codec import Ints
from quartet.wire.pairs import SCORE, Pair


class Evaluator:
    """Samples from the deployed policy for the same prompts each time, and has every sample scored."""

    def __init__(
        self,
        collector: Collector,
        requests: Sequence[SampleRequest],
        algorithm: Algorithm,
        tokenizer: Any,
        judges: Mapping[str, Judge],
        judge_s: float,
        folder: Path,
    ) -> None:
        self._collector = collector
        self._requests = requests
        self._algorithm = algorithm
        self._tokenizer = tokenizer
        self._judges = judges
        self._judge_s = judge_s
        self._folder = folder

    async def evaluate(self, step: int, version: int) -> dict[str, float]:
        """Evaluates `version`, writes the samples to `<folder>/step-<step>.jsonl` and returns the metrics. Named
        scores have the weights that they had in that step; before training, those of the first."""
        # A later version would be another policy's result.
        collected = await self._collector.collect(self._requests, version=version, newest=version, critic_step=None)
        scored = collected.scored_by(self._algorithm, max(step, 1))
        rows = await evaluate_samples(scored, self._tokenizer, self._judges, self._judge_s)
        write_rows(self._folder / f"step-{step:06d}.jsonl", rows)
        return summarise(rows)


async def evaluate_samples(
    collected: Collected, tokenizer: Any, judges: Mapping[str, Judge], judge_s: float
) -> list[EvaluatedSample]:
    """The samples as text, with every judge's verdict, for which each judge has `judge_s`. Judges get prompts decoded
    from their tokens, without special ones, and of several sequences the last one, as reward functions do.
    ConfigError as `verdicts` raises it."""
    columns, prompts = collected.columns, collected.prompts
    last = columns.last_sequences()

    def decoded(rows: Sequence[Ints]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts

    asked, responses = decoded(list(last.prompts)), decoded(list(last.responses))
    pairs = [
        Pair(prompt=text, response=response, label=prompt.label, ended=not truncated, texts=texts)
        for prompt, text, response, truncated, texts in zip(
            prompts, asked, responses, columns["truncated"].tolist(), _parts(last, tokenizer), strict=True
        )
    ]
    judged = await verdicts(judges, pairs, judge_s)
    named = {name: values for name, values in scores_of(columns).items() if name != SCORE}
    return [
        EvaluatedSample(
            row=prompt.row,
            prompt=prompt.text,
            response=pair.response,
            label=pair.label,
            ended=pair.ended,
            task=prompt.task,
            score=score,
            scores={name: float(values[index]) for name, values in named.items()},
            kl=kl,
            length=length,
            judges={name: values[index] for name, values in judged.items()},
        )
        for index, (prompt, pair, score, kl, length) in enumerate(
            zip(prompts, pairs, columns["score"].tolist(), kl_of(columns), columns.counts.tolist(), strict=True)
        )
    ]


def _parts(columns: Columns, tokenizer: Any) -> list[tuple[str, ...]]:
    """The texts of what followed each prompt; nothing for one response."""
    if columns.single_turn:
        return [()] * len(columns)
    parts = [columns.segments(row) for row in range(len(columns))]
    return [tuple(tokenizer.batch_decode(each, skip_special_tokens=True)) if len(each) > 1 else () for each in parts]


def kl_of(columns: Columns) -> list[float]:
    """Sum over each response of log pi - log pi_ref: the k1 estimate, in nats. NaN without a reference."""
    if "ref_logprobs" not in columns:
        return [math.nan] * len(columns)
    differences = columns.with_sampled(difference=columns["logprobs"] - columns["ref_logprobs"])
    return [float(row.sum()) for row in differences.rows("difference")]


def summarise(rows: Sequence[EvaluatedSample]) -> dict[str, float]:
    """The evaluation's metrics: scores, those of each task, and the judges with their 95 % intervals."""
    metrics = _with_interval("eval/score", [(row.row, row.score) for row in rows]) | {
        "eval/length": float(np.mean([row.length for row in rows])),
        "eval/truncated": float(np.mean([not row.ended for row in rows])),
    }
    if unscored := sum(math.isnan(row.score) for row in rows):
        metrics["eval/unscored"] = unscored
    if not np.isnan(kl := float(np.mean([row.kl for row in rows]))):
        metrics["eval/kl"] = kl
    for name in rows[0].judges if rows else {}:
        metrics |= _with_interval(f"eval/{name}", [(row.row, row.judges[name]) for row in rows])
    for name in rows[0].scores if rows else {}:
        metrics |= _with_interval(f"eval/score/{name}", [(row.row, row.scores[name]) for row in rows])
    for task in sorted({row.task for row in rows} - {""}):
        its = [(row.row, row.score) for row in rows if row.task == task]
        metrics |= _with_interval(f"eval/task/{task}/score", its)
    return metrics


def _with_interval(name: str, values: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The mean of the values that are numbers, with its interval; nothing if there are none."""
    if (interval := over_known(values)) is None:
        return {}
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
