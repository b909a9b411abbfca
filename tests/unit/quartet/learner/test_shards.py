"""Sharing sequences out among ranks."""

import numpy as np
import pytest

from quartet.learner.shards import Pass, shards
from quartet.models.sequences import packed_batches
from tests.unit.rows import pairs


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_each_sequence_counts_once_and_all_ranks_have_equally_many_parts(
    world_size: int, count: int, max_tokens: int
) -> None:
    prompts, responses = pairs(count)
    dealt = shards(prompts, responses, max_tokens=max_tokens, world_size=world_size)
    assert len(dealt) == world_size
    assert len({len(parts) for parts in dealt}) == 1
    counted = [row for parts in dealt for part in parts if part.counts for row in part.rows]
    assert sorted(counted) == list(range(count))
    for part in (part for parts in dealt for part in parts):
        padded = max(len(prompts[i]) for i in part.rows) + max(len(responses[i]) for i in part.rows)
        assert len(part.rows) == 1 or len(part.rows) * padded <= max_tokens


def test_packed_parts_are_limited_by_their_tokens_alone() -> None:
    prompts, responses = pairs(40)
    dealt = shards(prompts, responses, packed_batches, max_tokens=60, world_size=2)
    assert sorted(row for parts in dealt for part in parts if part.counts for row in part.rows) == list(range(40))
    sums = [sum(len(prompts[i]) + len(responses[i]) for i in part.rows) for parts in dealt for part in parts]
    assert max(sums) <= 60
    padded = shards(prompts, responses, max_tokens=60, world_size=2)
    assert len(dealt[0]) < len(padded[0])


def test_ranks_have_about_as_many_tokens_to_do() -> None:
    prompts, responses = pairs(64)
    dealt = shards(prompts, responses, max_tokens=10_000, world_size=4)
    tokens = [sum(len(responses[i]) for part in parts for i in part.rows) for parts in dealt]
    assert max(tokens) < 1.15 * min(tokens)


def test_a_rank_without_a_sequence_repeats_the_shortest_uncounted() -> None:
    prompts = [np.ones(2, np.int32)] * 2
    responses = [np.ones(9, np.int32), np.ones(3, np.int32)]
    assert shards(prompts, responses, max_tokens=1, world_size=3) == [
        [Pass((1,))],
        [Pass((0,))],
        [Pass((1,), counts=False)],
    ]


def test_nothing_has_no_parts() -> None:
    assert shards([], [], max_tokens=1, world_size=2) == [[], []]
