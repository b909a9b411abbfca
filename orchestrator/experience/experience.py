"""Experience: trajectories with everything that they are trained on, in columns."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from orchestrator.algorithms.contract import Algorithm, Outcomes
from orchestrator.data.prompts import Prompt
from orchestrator.experience.conversation import trajectories
from quartet.columns import Columns, Field, Schema
from quartet.wire.codec import Floats
from quartet.wire.pairs import SCORE

SCHEMA: Schema = {
    "number": Field("row", "int64"),
    "group": Field("row", "int64"),
    "row": Field("row", "int64"),
    "score": Field("row"),
    "truncated": Field("row", "bool"),
    "kept": Field("row", "int32"),
    "turn": Field("row", "int32"),
    "calls": Field("row", "int32"),
    "wrong_calls": Field("row", "int32"),
    "turn_rewards": Field("sampled", optional=True),
    "process_rewards": Field("sampled", optional=True),
    "logprobs": Field("sampled"),
    "versions": Field("sampled", "int32"),
    "ref_logprobs": Field("sampled", optional=True),
    "values": Field("sampled", optional=True),
    "old_logprobs": Field("sampled", optional=True),
}
"""Columns of experience.

- number, group: of the sample, as in SampleRequest.
- row: of its prompt, as in Prompt.
- score: of the reward service, and the rewards of turns; of several named ones the sum, and `score/<name>` each of
  them.
- truncated: True if the length limit cut the last response off, or left no room for another turn.
- kept: number of its tokens that came from replicas which did not finish the response.
- turn: number of its responses.
- calls: number of calls of tools that were answered, and `wrong_calls` of those that could not be made.
- turn_rewards: of each response at its last token; missing if conversations have no turns.
- process_rewards: the parts of the score at the tokens that earned them; missing if the scorer gives none.
- logprobs: of the policy that sampled each token, and `versions`, which one that was.
- ref_logprobs: the reference's; missing if the run has none.
- values: the critic's; missing if they were not asked for.
- old_logprobs: the learner's before the update; missing if they were left for the loop.
"""


def score_column(name: str) -> str:
    """The column of the scores of a name."""
    return SCORE if name == SCORE else f"{SCORE}/{name}"


def schema_of(names: Iterable[str]) -> Schema:
    """The columns of experience whose scores have these names."""
    return {**SCHEMA, **{score_column(name): Field("row") for name in names}}


def scores_of(columns: Columns) -> dict[str, Floats]:
    """Name -> scores, [B], of each named score that there is, or of the only one."""
    prefix = score_column("")
    named = {name.removeprefix(prefix): columns[name] for name in columns.columns if name.startswith(prefix)}
    return named or {SCORE: columns[SCORE]}


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Samples that came together and are complete, with the moments of their making in seconds of the monotonic
    clock."""

    columns: Columns
    """The columns of SCHEMA."""
    prompts: Sequence[Prompt]
    """The prompt of each."""
    asked: float
    """Moment of the call of the rollout service."""
    sampled: float
    """Moment at which the samples came."""
    complete: float
    """Moment of the last answer."""


Row = tuple[Finished, int]
"""One sample: those that it came with, and its index among them."""


class Scored(NamedTuple):
    """A sample and what it scored: all that is kept of one that is discarded."""

    number: int
    row: int
    """Row of its prompt, as in Prompt."""
    score: float
    """NaN if it has none."""


@dataclass(frozen=True)
class Collected:
    """One batch of B samples, in the order of their numbers."""

    columns: Columns
    """The columns of SCHEMA."""
    prompts: Sequence[Prompt]
    """The prompt of each sample."""
    generate_s: float
    """Seconds from the first request to the last finished sample."""
    score_s: float
    """Seconds that scoring took after that."""
    repeated: int = 0
    """Number of requests for samples that were repeated because their replica was lost, stuck or too old. No sample
    is in `columns` twice."""
    group_s: float | None = None
    """Mean seconds from the moment at which a sample was complete to that of the last one of its group; None if no
    group has several."""
    discarded: tuple[Scored, ...] = ()
    """The samples that were made for it and discarded with their groups, in the order of their numbers."""
    kept: bool = False
    """True if it was read from the journal, and need not be written again."""

    @classmethod
    def of(cls, rows: Iterable[Row], repeated: int, discarded: Iterable[Scored] = ()) -> Self:
        """A batch of these, in the order of their numbers, with the columns that all of them have."""
        chosen = sorted(rows, key=lambda row: row[0].columns["number"][row[1]])
        if not chosen:
            return cls(_nothing(), [], 0.0, 0.0, repeated, discarded=tuple(sorted(discarded)))
        parts = list(dict.fromkeys(finished for finished, _ in chosen))
        common = set.intersection(*(set(part.columns.columns) for part in parts))
        offsets, whole = {}, 0
        for part in parts:
            offsets[part] = whole
            whole += len(part.columns)
        columns = Columns.concatenate([part.columns.select(*sorted(common)) for part in parts])
        asked, sampled = min(part.asked for part in parts), max(part.sampled for part in parts)
        return cls(
            columns.take([offsets[finished] + index for finished, index in chosen]),
            [finished.prompts[index] for finished, index in chosen],
            sampled - asked,
            max(part.complete for part in parts) - sampled,
            repeated,
            _waits_in_groups(chosen),
            tuple(sorted(discarded)),
        )

    def __len__(self) -> int:
        return len(self.columns)

    def with_sampled(self, **columns: Any) -> Self:
        """With these columns of one number per sampled token."""
        return replace(self, columns=self.columns.with_sampled(**columns))

    def scored_by(self, algorithm: Algorithm, step: int) -> Self:
        """With the column `score`, of several named scores their sum at this step."""
        score = algorithm.score(scores_of(self.columns), step)
        return replace(self, columns=self.columns.with_rows(**{SCORE: score}))

    @cached_property
    def trained_numbers(self) -> list[int]:
        """Numbers of the samples that the step trains on."""
        numbers: list[int] = self.columns["number"].tolist()
        return numbers

    @property
    def numbers(self) -> list[int]:
        """Numbers of all samples that the step uses up: those that it trains on, and those discarded for it."""
        return self.trained_numbers + [each.number for each in self.discarded]

    @property
    def scored(self) -> list[Scored]:
        """All samples that the step uses up, in the order of their numbers."""
        columns = (self.columns[name].tolist() for name in ("number", "row", "score"))
        return sorted([*itertools.starmap(Scored, zip(*columns, strict=True)), *self.discarded])

    @property
    def outcomes(self) -> Outcomes:
        """The samples as an algorithm chooses among them."""
        return Outcomes(self.columns["group"], scores_of(self.columns), self.columns["truncated"])

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return self.columns.size("sampled")


def _waits_in_groups(rows: Sequence[Row]) -> float | None:
    groups: dict[int, list[float]] = {}
    for finished, index in rows:
        groups.setdefault(int(finished.columns["group"][index]), []).append(finished.complete)
    if len(groups) == len(rows):
        return None
    return sum(max(moments) - each for moments in groups.values() for each in moments) / len(rows)


def _nothing() -> Columns:
    """The columns of no samples."""
    return trajectories([]).with_rows(score=np.empty(0, np.float32))
