"""The room in the KV cache that requests are started for."""

import random

import pytest

from services.rollout.vllm.room import FREEING_STEPS, Need, most_blocks, startable

SEEDS = range(200)


def held(needs: list[Need], block_size: int) -> int:
    """Most blocks held by requests that are carried out step by step, each to its last token."""
    most = 0
    for step in range(max(need.left for need in needs) + FREEING_STEPS + 1):
        going = [need for need in needs if step <= need.left + FREEING_STEPS]
        most = max(most, sum(-(-(need.now + min(step, need.left)) // block_size) for need in going))
    return most


def random_needs(draw: random.Random) -> list[Need]:
    return [Need(draw.randint(1, 200), draw.randint(0, 300)) for _ in range(draw.randint(1, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_never_hold_more_than_it_says(seed: int) -> None:
    draw = random.Random(seed)
    needs, block_size = random_needs(draw), draw.choice([1, 16, 64])
    # At most one block for each more than needed, and what they would sample in the steps of the lag.
    slack = len(needs) * (2 + FREEING_STEPS // block_size)
    assert held(needs, block_size) <= most_blocks(needs, block_size) <= held(needs, block_size) + slack


def test_what_one_gives_back_another_may_grow_into() -> None:
    # As in the docstring, where each last block is counted as if it were another.
    assert most_blocks([Need(60, 10 - FREEING_STEPS), Need(10, 90 - FREEING_STEPS)], 10) == 11
    assert most_blocks([], 10) == 0


def test_as_many_start_as_fit_beside_those_that_run() -> None:
    need = Need(10, 20 - FREEING_STEPS)  # 30 tokens in the end, three blocks and perhaps one more
    assert startable([], [need] * 5, blocks=12, block_size=10) == 3
    assert startable([need] * 2, [need] * 5, blocks=12, block_size=10) == 1
    assert startable([need] * 3, [need] * 5, blocks=12, block_size=10) == 0
    # Order is kept: the second would fit, but the first does not.
    assert startable([need] * 2, [Need(30, 20), need], blocks=12, block_size=10) == 0


def test_one_alone_always_starts() -> None:
    assert startable([], [Need(1000, 1000)] * 2, blocks=1, block_size=10) == 1
