"""Figures of an evaluation of rows: of each measure, with its scorer's identity, over all rows or some of them."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.evaluation.hub import OUTCOMES, SCORERS, SCORES
from orchestrator.evaluation.intervals import Interval
from orchestrator.evaluation.rows import lines, parse
from orchestrator.evaluation.statistics import Comparison, bootstrap, compare, pass_at_k
from quartet.config.base import ConfigError
from quartet.wire.outcomes import Outcome

ROWS, JOURNAL, SUMMARY = "rows.jsonl", "journal.jsonl", "summary.json"
"""Files of an evaluation's folder."""
UNANSWERED = "unanswered"
"""Column of a row without a response, with the reason; and, among outcomes, the name of this one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A sample as figures need it."""

    prompt: bytes
    """Identity of the prompt with its label."""
    scores: Mapping[str, float | None]
    """Measure -> score."""
    outcomes: Mapping[str, str]
    """Scorer -> outcome; empty for a sample without a response."""
    values: Mapping[str, str]
    """Column -> value, of the columns by which figures are divided."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure over the samples of one group."""

    measure: str
    scorer: Mapping[str, str]
    """Name and hash of its scorer."""
    group: str
    """Column and value of the samples, such as `source=math`; empty for all."""
    prompts: int
    """Number of prompts that have a score."""
    scored: int
    """Number of samples that have one."""
    unscored: Mapping[str, int]
    """Outcome -> number of samples that have none."""
    mean: Interval | None
    """Mean over prompts of the means of their samples, with a bootstrap interval; None without any score."""
    passes: Mapping[int, Interval]
    """k -> pass@k, its mean over the prompts that have k or more scores."""
    few: Mapping[int, int]
    """k -> number of prompts with a score that have fewer than k, which pass@k leaves out."""
    against: Comparison | None
    """This evaluation as A and another one as B; None without another."""

    def written(self) -> dict[str, Any]:
        """The figure as JSON has it, with null in the place of a number that is missing."""
        compared = self.against
        return {
            "measure": self.measure,
            "scorer": dict(self.scorer),
            "group": self.group,
            "prompts": self.prompts,
            "scored": self.scored,
            "unscored": dict(self.unscored),
            "mean": _bounds(self.mean),
            "pass_at": {str(k): _bounds(interval) for k, interval in self.passes.items()},
            "pass_at_left_out": {str(k): count for k, count in self.few.items() if count},
            "against": compared
            and {
                "prompts": compared.prompts,
                "win_rate": _bounds(compared.wins),
                "difference": _bounds(compared.difference),
                "better": compared.better,
                "worse": compared.worse,
                "ties": compared.prompts - compared.better - compared.worse,
                "sign_test_p": compared.p,
            },
        }


def _bounds(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    named = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: None if math.isnan(value) else value for name, value in named.items()}


def figures(
    samples: Sequence[Measured],
    scorers: Mapping[str, tuple[Mapping[str, str], Sequence[str]]],
    *,
    by: Sequence[str] = (),
    pass_at: Sequence[int] = (),
    passes: float = 1.0,
    against: Sequence[Measured] | None = None,
) -> list[Figure]:
    """The figures of all samples, and then of those of each value of each column in `by`.

    Args:
        samples: the evaluation's.
        scorers: scorer -> its name and hash, and the measures that it gives.
        by: columns.
        pass_at: the k of pass@k, for each measure.
        passes: a response passes whose score is this or more.
        against: samples of another evaluation of the same prompts by the same scorers.
    """
    groups: list[tuple[str, list[Measured]]] = [("", list(samples))]
    for column in by:
        parts = defaultdict[str, list[Measured]](list)
        for sample in samples:
            parts[sample.values[column]].append(sample)
        groups += [(f"{column}={value}", part) for value, part in sorted(parts.items())]
    return [
        _figure(measure, name, identity, group, part, pass_at, passes, against)
        for group, part in groups
        for name, (identity, measures) in scorers.items()
        for measure in measures
    ]


def _figure(
    measure: str,
    scorer: str,
    identity: Mapping[str, str],
    group: str,
    samples: Sequence[Measured],
    pass_at: Sequence[int],
    passes: float,
    against: Sequence[Measured] | None,
) -> Figure:
    scores = by_prompt(samples, measure)
    scored = Outcome.SCORED.name.lower()
    unscored = Counter(sample.outcomes.get(scorer, UNANSWERED) for sample in samples)
    counted = {k: [each for each in scores.values() if len(each) >= k] for k in pass_at}
    theirs = {} if against is None else by_prompt(against, measure)
    pairs = [(scores[prompt], theirs[prompt]) for prompt in scores if prompt in theirs]
    return Figure(
        measure=measure,
        scorer=identity,
        group=group,
        prompts=len(scores),
        scored=unscored.pop(scored, 0),
        unscored=dict(sorted(unscored.items())),
        mean=bootstrap([math.fsum(each) / len(each) for each in scores.values()]) if scores else None,
        passes={
            k: bootstrap([pass_at_k(len(each), sum(score >= passes for score in each), k) for each in enough])
            for k, enough in counted.items()
            if enough
        },
        few={k: len(scores) - len(enough) for k, enough in counted.items()},
        against=compare(pairs) if pairs else None,
    )


def by_prompt(samples: Iterable[Measured], measure: str) -> dict[bytes, list[float]]:
    """Prompt -> the scores of its samples; samples without a score, and prompts without any, are left out."""
    found = defaultdict[bytes, list[float]](list)
    for sample in samples:
        if (score := sample.scores.get(measure)) is not None:
            found[sample.prompt].append(score)
    return dict(found)


def read_measured(path: Path, by: Sequence[str] = ()) -> Iterator[tuple[Measured, Mapping[str, Mapping[str, str]]]]:
    """The samples of a file of scored rows, each with its scorers' names and hashes.

    Raises:
        ConfigError: a row is not one of them, or lacks a column in `by`.
    """
    with path.open("rb") as file:
        for number, _, line in lines(file, str(path)):
            row, where = parse(line, number, str(path)), f"{path}, line {number}"
            scores, outcomes, scorers = (row.values.get(name) for name in (SCORES, OUTCOMES, SCORERS))
            if not (isinstance(scores, dict) and isinstance(outcomes, dict) and isinstance(scorers, dict)):
                raise ConfigError(
                    f"{where}: has no {SCORES}, {OUTCOMES} and {SCORERS}; `quartet evaluate` writes them"
                )
            for column in by:
                if column not in row.values:
                    raise ConfigError(f"{where}: {column}: required by --by")
            values = {column: as_text(row.values[column]) for column in by}
            yield Measured(row.key, scores, outcomes, values), scorers


def as_text(value: Any) -> str:
    """A column's value as figures are named by it: a text, or the JSON of another value."""
    return value if isinstance(value, str) else json.dumps(value)


def read_other(path: Path, scorers: Mapping[str, Mapping[str, str]]) -> list[Measured]:
    """The samples of another evaluation, to compare with.

    Raises:
        ConfigError: it lacks one of these scorers, or its scorer of that name was another one.
    """
    if not path.is_file():
        raise ConfigError(f"--against: no such file: {path}; name the folder that another `quartet evaluate` wrote")
    others = []
    for sample, theirs in read_measured(path):
        others.append(sample)
        for name, identity in scorers.items():
            if theirs.get(name) != identity:
                was = theirs.get(name)
                told = f"{was['name']} {was['hash'][:12]}" if was else "was not asked"
                raise ConfigError(
                    f"--against {path}: scorer {name}: {told} there, and {identity['name']} {identity['hash'][:12]} "
                    "here; scores of two scorers cannot be compared"
                )
    return others
