"""Checks of a configuration against the run that it resumes."""

import pytest

from orchestrator.commands.beginning import check_groups
from services.common.config.base import ConfigError


@pytest.mark.parametrize("before", [{"ppo": {"samples_per_prompt": 4}}, {"ppo": {}}, {}], ids=["4", "1", "none"])
def test_a_prompt_keeps_its_number_of_samples(before: dict[str, dict[str, int]]) -> None:
    actual = before.get("ppo", {}).get("samples_per_prompt", 1)
    check_groups({"orchestrator": before}, actual)
    said = (
        rf"^orchestrator.ppo.samples_per_prompt: 2, but the run began with {actual}, and samples of different prompts"
    )
    with pytest.raises(ConfigError, match=said):
        check_groups({"orchestrator": before}, 2)
