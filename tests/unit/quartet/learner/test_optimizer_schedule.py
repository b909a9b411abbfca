"""The learning rate against hand-computed values."""

from typing import Any

import pytest

from quartet.config.learner import OptimizerConfig
from quartet.learner.optimizer import rate_factor


def factors(steps: int, **options: Any) -> list[float]:
    config = OptimizerConfig(learning_rate=1, **options)
    return [rate_factor(step, config) for step in range(steps)]


def test_constant() -> None:
    assert factors(3) == [1, 1, 1]


def test_warm_up_rises_in_equal_parts_and_is_never_zero() -> None:
    # 1/4, 2/4, 3/4, then the full rate.
    assert factors(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1]


def test_half_cosine() -> None:
    # final + (1 - final) * (1 + cos(pi * k / 4)) / 2 for k = 0 to 4, then the final rate.
    expected = [1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2, 0.2, 0.2]
    actual = factors(7, schedule="cosine", total_steps=4, final_fraction=0.2)
    assert actual == pytest.approx(expected, abs=1e-6)


def test_the_cosine_begins_after_the_warm_up() -> None:
    # Warm-up 1/3, 2/3; the cosine spans steps 2 to 6, and its middle is at step 4.
    actual = factors(8, schedule="cosine", warmup_steps=2, total_steps=6, final_fraction=0)
    assert actual == pytest.approx([1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_a_constant_rate_ignores_where_a_cosine_would_end() -> None:
    assert factors(4, total_steps=2) == [1, 1, 1, 1]
