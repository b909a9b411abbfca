"""Limits that a file gives in part."""

from pathlib import Path
from typing import Any

import pytest

from quartet.config.base import ConfigError
from services.critic.config import CriticConfig
from services.rollout.config import RolloutConfig


def rollout(folder: Path, limits: Any) -> RolloutConfig:
    return RolloutConfig.parse({"model": str(folder), "limits": limits}, "rollout")


def test_a_services_own_limits_stay_where_a_file_gives_others(policy_folder: Path) -> None:
    limits = rollout(policy_folder, {"caller_share": 0.4}).limits
    assert (limits.caller_share, limits.max_call_tokens, limits.max_waiting_tokens) == (0.4, 16 << 20, 256 << 20)
    own = {"limits": {"max_call_rows": 8}, "train_limits": {"max_waiting_rows": 1 << 18}}
    given = {"model": str(policy_folder), "optimizer": {"learning_rate": 0.1}, **own}
    critic = CriticConfig.parse(given, "critic")
    assert (critic.limits.batch_s, critic.limits.max_call_rows) == (60, 8)
    assert (critic.train_limits.max_call_tokens, critic.train_limits.max_waiting_rows) == (1 << 26, 1 << 18)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"caller_shar": 0.4}, r"rollout\.limits\.caller_shar: unknown field"),
        ({"max_call_rows": 0}, r"rollout\.limits\.max_call_rows: "),
        (3, r"rollout\.limits: "),
        ({"max_call_tokens": 1 << 28}, "max_call_tokens: 268435456; should be at most 134217728"),
    ],
)
def test_wrong_limits_are_named(policy_folder: Path, limits: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        rollout(policy_folder, limits)
