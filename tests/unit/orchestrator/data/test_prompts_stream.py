"""Prompts dealt out without an end: by seed and number alone, each pass a permutation."""

import numpy as np
import pytest

from orchestrator.data.prompts import Prompt, PromptStream


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row, np.array([row], np.int32), str(row), "") for row in range(count)]


def test_each_epoch_of_the_stream_is_a_permutation_and_batches_cross_its_border() -> None:
    stream = PromptStream(prompts(7), seed=0)
    # 7 batches of 3 are exactly 3 epochs of 7.
    dealt = [prompt.row for first in range(0, 21, 3) for prompt in stream.dealt(first, 3)]
    epochs = [dealt[:7], dealt[7:14], dealt[14:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_larger_than_the_data_spans_epochs() -> None:
    dealt = [prompt.row for prompt in PromptStream(prompts(3), seed=1).dealt(8, 8)]
    assert len(dealt) == 8
    # Numbers 8 to 15: the third epoch's end, the whole fourth and fifth, one of the sixth.
    assert sorted(dealt[1:4]) == sorted(dealt[4:7]) == [0, 1, 2]


def test_a_prompt_depends_on_seed_and_number_alone() -> None:
    stream, resumed = (PromptStream(prompts(50), seed=5) for _ in range(2))
    one_by_one = [stream.dealt(number, 1)[0].row for number in range(130)]
    assert [p.row for p in resumed.dealt(60, 70)] == one_by_one[60:]
    other = PromptStream(prompts(50), seed=6)
    assert [p.row for p in other.dealt(60, 70)] != one_by_one[60:]


def test_samples_in_a_row_share_a_prompt() -> None:
    plain, paired = PromptStream(prompts(3), seed=1), PromptStream(prompts(3), seed=1, each=2)
    rows = [prompt.row for prompt in plain.dealt(0, 7)]
    twice = [row for row in rows for _ in range(2)]
    assert [prompt.row for prompt in paired.dealt(0, 14)] == twice
    # From any number on, also within a pair and over the border between passes.
    assert [paired.dealt(number, 1)[0].row for number in range(14)] == twice
    assert [prompt.row for prompt in paired.dealt(5, 4)] == twice[5:9]


def test_bad_streams() -> None:
    with pytest.raises(ValueError, match="prompts: empty"):
        PromptStream([], 0)
    with pytest.raises(ValueError, match="each: should be at least 1, got 0"):
        PromptStream(prompts(1), 0, each=0)
    for first, count in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"first, count: should be at least 0 and 1, got {first} and {count}"):
            PromptStream(prompts(1), 0).dealt(first, count)
