"""Experience sample by sample, for tests that write it by hand or read it so."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from orchestrator.data.prompts import Prompt
from orchestrator.experience.conversation import Conversation, trajectories
from orchestrator.experience.experience import Collected, Finished
from orchestrator.experience.requests import SampleRequest
from quartet.wire.codec import Floats
from services.rollout.sample import FinishReason, Sample
from tests.trajectories import joined

PER_TOKEN = ("ref_logprobs", "values", "old_logprobs")


@dataclass(frozen=True)
class Experience:
    """One response of T tokens. Each array is [T], or empty where it is missing."""

    number: int
    prompt: Prompt
    sample: Sample
    score: float
    ref_logprobs: Floats
    values: Floats
    old_logprobs: Floats = field(default_factory=lambda: np.empty(0, np.float32))


def collected(
    rows: Sequence[Experience], generate_s: float = 0.0, score_s: float = 0.0, *, each: int = 1, **rest: Any
) -> Collected:
    """The batch of these, of which `each` in a row are a group, numbered by the place of its first."""
    if not rows:
        return Collected.of([], rest.get("repeated", 0), rest.get("discarded", ()))
    requests = [SampleRequest(row.number, row.prompt, None, index - index % each) for index, row in enumerate(rows)]
    asked = zip(requests, rows, strict=True)
    columns = trajectories([Conversation.of(request).responded(row.sample) for request, row in asked])
    columns = columns.with_rows(score=np.asarray([row.score for row in rows], np.float32))
    for name in PER_TOKEN:
        if all(len(getattr(row, name)) for row in rows):
            columns = columns.with_sampled(**{name: joined([getattr(row, name) for row in rows])})
    return Collected(columns, [row.prompt for row in rows], generate_s, score_s, **rest)


def each(batch: Collected | Finished) -> list[Experience]:
    """The samples of a batch."""
    columns, made = batch.columns, []
    per_token = {name: columns.rows(name) if name in columns else None for name in PER_TOKEN}
    for index, prompt in enumerate(batch.prompts):
        versions = columns.rows("versions")[index].tolist()
        cuts = [0, *(at for at in range(1, len(versions)) if versions[at] != versions[at - 1]), len(versions)]
        sample = Sample(
            index,
            columns.responses[index],
            columns.rows("logprobs")[index],
            FinishReason.LENGTH if columns["truncated"][index] else FinishReason.STOP,
            tuple((versions[a], a, b) for a, b in pairwise(cuts)),
            int(columns["kept"][index]),
        )
        numbers = [np.empty(0, np.float32) if rows is None else rows[index] for rows in per_token.values()]
        made.append(
            Experience(int(columns["number"][index]), prompt, sample, float(columns["score"][index]), *numbers)
        )
    return made
