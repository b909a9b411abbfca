"""Two evaluations of a run side by side: the first, usually before training, and the last."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.evaluation.intervals import Interval, over_known, win_rate
from orchestrator.evaluation.results import EvaluatedSample, read_rows
from orchestrator.monitoring.metrics import EVALUATIONS, evaluated_steps


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Two responses to the same prompt."""

    before: EvaluatedSample
    after: EvaluatedSample


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity before and after, with 95 % intervals over prompts; None if it is not known."""

    name: str
    unit: str
    before: Interval | None
    after: Interval | None
    change: Interval | None
    """Mean of the differences, prompt by prompt."""
    wins: Interval | None
    """Share of pairs in which the later response has more of it; only for quantities of which more is better."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The samples taken after a step."""

    step: int
    samples: list[EvaluatedSample]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first evaluation of a run and, once there is another, the last."""

    before: Evaluation
    after: Evaluation | None

    @property
    def steps(self) -> list[int]:
        """The steps of the two, or of the only one."""
        return [each.step for each in (self.before, self.after) if each]

    def pairs(self) -> list[BeforeAfter]:
        """Pairs of responses to the same prompt: the first with the first, the second with the second, and so on."""
        later: defaultdict[int, list[EvaluatedSample]] = defaultdict(list)
        for sample in self.after.samples if self.after else []:
            later[sample.row].append(sample)
        queues = {row: iter(samples) for row, samples in later.items()}
        matched = ((sample, next(queues.get(sample.row, iter(())), None)) for sample in self.before.samples)
        return [BeforeAfter(before, after) for before, after in matched if after is not None]

    def measures(self) -> list[Measure]:
        """The held-out score, each named one, each judge, the KL, and the shape of the responses."""
        samples = [*self.before.samples, *(self.after.samples if self.after else [])]
        judges = dict.fromkeys(name for sample in samples for name in sample.judges)
        names = dict.fromkeys(name for sample in samples for name in sample.scores)
        return [
            self._measure("held-out score", "", lambda sample: sample.score, more_is_better=True),
            *(self._measure(f"score {name}", "", _score_of(name), more_is_better=True) for name in names),
            *(self._measure(name, "", _verdict_of(name), more_is_better=True) for name in judges),
            self._measure("KL to reference", "nats per response", lambda sample: sample.kl),
            self._measure("response length", "tokens", lambda sample: sample.length),
            self._measure("cut off at the limit", "% of responses", lambda sample: 100.0 * (not sample.ended)),
        ]

    def _measure(
        self, name: str, unit: str, value: Callable[[EvaluatedSample], float], *, more_is_better: bool = False
    ) -> Measure:
        valued = [(pair.before.row, value(pair.before), value(pair.after)) for pair in self.pairs()]
        valued = [triple for triple in valued if math.isfinite(triple[1] + triple[2])]
        before, after = [first for _, first, _ in valued], [second for _, _, second in valued]
        return Measure(
            name,
            unit,
            before=over_known([(sample.row, value(sample)) for sample in self.before.samples]),
            after=over_known([(sample.row, value(sample)) for sample in self.after.samples]) if self.after else None,
            change=over_known([(row, second - first) for row, first, second in valued]),
            wins=win_rate(after, before) if more_is_better and valued else None,
        )


def measures_of_examples(metrics: Sequence[Mapping[str, float]]) -> tuple[list[Measure], list[int]]:
    """Held-out accuracy and loss of a training on examples, at its first and its last evaluation; and the steps of
    these two, or of the only one. Nothing of a run without."""
    evaluated = [line for line in metrics if "eval/loss" in line]
    ends = [*evaluated[:1], *evaluated[1:][-1:]]
    measures = []
    for name, unit, scale in (("accuracy", "% of comparisons", 100.0), ("loss", "nats", 1.0)):
        if not ends or f"eval/{name}" not in ends[0]:
            continue
        before, *after = (
            Interval(*(scale * line.get(f"eval/{name}{bound}", math.nan) for bound in ("", "_low", "_high")))
            for line in ends
        )
        measures.append(Measure(f"held-out {name}", unit, before, after[0] if after else None, None, None))
    return measures, [int(line["step"]) for line in ends]


def read_comparison(run_dir: Path) -> Comparison | None:
    """The first and the last of run_dir/evaluations/step-<number>.jsonl, or None without evaluations.

    Raises:
        ConfigError: a line is not a sample.
    """
    files = [*evaluated_steps(run_dir / EVALUATIONS).items()]
    if not files:
        return None
    before, *later = (Evaluation(step, read_rows(file)) for step, file in (files[0], *files[1:][-1:]))
    return Comparison(before, later[0] if later else None)


def _verdict_of(name: str) -> Callable[[EvaluatedSample], float]:
    return lambda sample: sample.judges.get(name, math.nan)


def _score_of(name: str) -> Callable[[EvaluatedSample], float]:
    return lambda sample: sample.scores.get(name, math.nan)
