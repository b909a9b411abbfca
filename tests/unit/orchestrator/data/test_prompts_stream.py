"""Prompts dealt out without an end: by seed and number alone, each pass a permutation."""

import numpy as np

from orchestrator.data.prompts import Prompt, PromptStream


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row, np.array([row], np.int32), str(row), "") for row in range(count)]


def test_each_epoch_of_the_stream_is_a_permutation() -> None:
    stream = PromptStream(prompts(7), seed=0)
    dealt = [stream.dealt(number).row for number in range(21)]
    epochs = [dealt[:7], dealt[7:14], dealt[14:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_prompt_depends_on_seed_and_number_alone() -> None:
    stream, resumed = (PromptStream(prompts(50), seed=5) for _ in range(2))
    rows = [stream.dealt(number).row for number in range(130)]
    assert [resumed.dealt(number).row for number in range(60, 130)] == rows[60:]
    assert [resumed.dealt(number).row for number in reversed(range(130))] == rows[::-1]
    other = PromptStream(prompts(50), seed=6)
    assert [other.dealt(number).row for number in range(60, 130)] != rows[60:]


def test_samples_in_a_row_share_a_prompt() -> None:
    plain, paired = PromptStream(prompts(3), seed=1), PromptStream(prompts(3), seed=1, each=2)
    twice = [plain.dealt(number).row for number in range(7) for _ in range(2)]
    assert [paired.dealt(number).row for number in range(14)] == twice
