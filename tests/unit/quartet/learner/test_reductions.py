"""Reductions against their closed forms, and the same however a batch is divided."""

import random
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from quartet.learner.minibatches import weight_of
from quartet.learner.reductions import Reduction, factors, units

Losses = list[np.ndarray[Any, Any]]
REDUCTIONS: list[Reduction] = ["tokens", "trajectories", 7]


def losses(seed: int, responses: int = 9) -> Losses:
    """Losses of the trained tokens of each response, of some of which none is trained on."""
    draw = np.random.default_rng(seed)
    rows = [draw.normal(size=draw.integers(0, 6)) for _ in range(responses - 1)]
    return [*rows, draw.normal(size=3)]


def closed(reduction: Reduction, rows: Losses) -> float:
    """The formulas as they are written at the head of the file."""
    rows = [row for row in rows if len(row)]
    if reduction == "tokens":
        return float(np.concatenate(rows).mean())
    if reduction == "trajectories":
        return float(np.mean([row.mean() for row in rows]))
    return float(np.mean([row.sum() / reduction for row in rows]))


def reduced(reduction: Reduction, rows: Losses, among: Losses) -> float:
    """Share of these responses in the loss of the minibatch that they are among: the mean over its tokens, each with
    its factor."""
    counts = [len(row) for row in among]
    scales = factors(reduction, counts) or [1.0] * len(among)
    by_row = {id(row): scale for row, scale in zip(among, scales, strict=True)}
    return float(sum(by_row[id(row)] * row.sum() for row in rows) / sum(counts))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_factored_mean_over_tokens_is_the_closed_form(reduction: Reduction, seed: int) -> None:
    rows = losses(seed)
    assert reduced(reduction, rows, rows) == pytest.approx(closed(reduction, rows), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parts_of_a_minibatch_add_up_to_it(reduction: Reduction, seed: int) -> None:
    rows, draw = losses(seed), random.Random(seed)
    shuffled = draw.sample(rows, len(rows))
    first, last = sorted(draw.sample(range(len(rows) + 1), 2))
    parts = [shuffled[:first], shuffled[first:last], shuffled[last:]]
    total = sum(reduced(reduction, part, rows) for part in parts)
    assert total == pytest.approx(closed(reduction, rows), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_minibatches_of_an_epoch_have_that_of_the_whole_batch_as_their_mean(
    reduction: Reduction, size: int
) -> None:
    rows = losses(3)
    counts = [len(row) for row in rows]
    total = 0.0
    for start in range(0, len(rows), size):
        chosen = list(range(start, min(start + size, len(rows))))
        if any(counts[i] for i in chosen):
            part = [rows[i] for i in chosen]
            total += weight_of(chosen, units(reduction, counts), size) * reduced(reduction, part, part)
    minibatches = len(rows) / min(size, len(rows))
    assert total / minibatches == pytest.approx(closed(reduction, rows), rel=1e-12)


def test_the_example_of_the_documentation() -> None:
    assert factors("trajectories", [1, 3]) == [2, 2 / 3]
    assert factors(2, [1, 3]) == [1, 1]
    assert factors("tokens", [1, 3]) is None
    assert factors("trajectories", [0, 4]) == [0, 1]
    assert units("tokens", [0, 4]) == [0, 4]
    assert units("trajectories", [0, 4]) == units(5, [0, 4]) == [0, 1]


def test_a_reduction_is_a_name_or_a_length() -> None:
    read: TypeAdapter[Reduction] = TypeAdapter(Reduction)
    assert [read.validate_python(each, strict=True) for each in REDUCTIONS] == REDUCTIONS
    for wrong in ("token", 0, -1, 1.5, None):
        with pytest.raises(ValidationError):
            read.validate_python(wrong, strict=True)
