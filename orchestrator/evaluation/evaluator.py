"""Evaluation on held-out prompts, scored by the deployed reward service and by judges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.evaluation.intervals import over_prompts
from orchestrator.evaluation.judges import Judge, verdicts
from orchestrator.evaluation.results import EvaluatedSample, write_rows
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Experience
from orchestrator.experience.requests import SampleRequest
from quartet.wire.codec import Ints
from quartet.wire.pairs import Pair


class Evaluator:
    """Samples from the deployed policy for the same prompts each time, and has every sample scored."""

    def __init__(
        self,
        collector: Collector,
        requests: Sequence[SampleRequest],
        tokenizer: Any,
        judges: Mapping[str, Judge],
        judge_s: float,
        folder: Path,
    ) -> None:
        self._collector = collector
        self._requests = requests
        self._tokenizer = tokenizer
        self._judges = judges
        self._judge_s = judge_s
        self._folder = folder

    async def evaluate(self, step: int, version: int) -> dict[str, float]:
        """Evaluates `version`, writes the samples to `<folder>/step-<step>.jsonl` and returns the metrics."""
        # A later version would be another policy's result.
        collected = await self._collector.collect(self._requests, version=version, newest=version, critic_step=None)
        rows = await evaluate_samples(collected.experiences, self._tokenizer, self._judges, self._judge_s)
        write_rows(self._folder / f"step-{step:06d}.jsonl", rows)
        return summarise(rows)


async def evaluate_samples(
    experiences: Sequence[Experience], tokenizer: Any, judges: Mapping[str, Judge], judge_s: float
) -> list[EvaluatedSample]:
    """The experiences as text, with every judge's verdict, for which each judge has `judge_s`. Judges get prompts
    decoded from their tokens, without special ones, as reward functions do. ConfigError as `verdicts` raises it."""

    def decoded(rows: Sequence[Ints]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts

    prompts = decoded([e.prompt.prompt_ids for e in experiences])
    responses = decoded([e.sample.response_ids for e in experiences])
    pairs = [
        Pair(prompt=prompt, response=response, label=e.prompt.label, ended=not e.truncated)
        for e, prompt, response in zip(experiences, prompts, responses, strict=True)
    ]
    judged = await verdicts(judges, pairs, judge_s)
    return [
        EvaluatedSample(
            row=e.prompt.row,
            prompt=e.prompt.text,
            response=pair.response,
            label=pair.label,
            ended=pair.ended,
            score=e.score,
            kl=e.kl,
            length=len(e.sample.response_ids),
            judges={name: values[index] for name, values in judged.items()},
        )
        for index, (e, pair) in enumerate(zip(experiences, pairs, strict=True))
    ]


def summarise(rows: Sequence[EvaluatedSample]) -> dict[str, float]:
    """The evaluation's metrics, the score and the judges with their 95 % intervals."""
    metrics = _with_interval("eval/score", [(row.row, row.score) for row in rows]) | {
        "eval/length": float(np.mean([row.length for row in rows])),
        "eval/truncated": float(np.mean([not row.ended for row in rows])),
    }
    if not np.isnan(kl := float(np.mean([row.kl for row in rows]))):
        metrics["eval/kl"] = kl
    for name in rows[0].judges if rows else {}:
        metrics |= _with_interval(f"eval/{name}", [(row.row, row.judges[name]) for row in rows])
    return metrics


def _with_interval(name: str, values: Sequence[tuple[int, float]]) -> dict[str, float]:
    interval = over_prompts(values)
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
