"""Engines are found by the name in the configuration."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quartet.config.base import ConfigError
from services.rollout.config import RolloutConfig
from services.rollout.engines import ENGINES, completions, kind_of, start


async def test_an_engine_of_the_users_own_is_started_by_its_import_path(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("an_engine_of_mine")

    async def begin(config: RolloutConfig) -> str:
        return f"engine for {config.model}"

    module.begin = begin
    monkeypatch.setitem(sys.modules, "an_engine_of_mine", module)
    config = RolloutConfig(model=str(policy_folder), engine="an_engine_of_mine:begin")
    assert str(await start(config)) == f"engine for {policy_folder}"
    assert kind_of(config).cpu_head_sizes is None


def test_vllm_is_the_default(policy_folder: Path) -> None:
    assert kind_of(RolloutConfig(model=str(policy_folder))) == ENGINES["vllm"]


@pytest.mark.parametrize("engine", ["sglang", "", "a b:c", "mine:", ":start", "mine:start()"])
def test_an_unknown_engine_is_refused_by_name(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine: .*vllm"):
        RolloutConfig.parse({"model": "m", "engine": engine}, "rollout")


def test_an_engine_of_the_users_own_has_no_answers_in_openais_protocol(policy_folder: Path) -> None:
    served: Any = None
    assert completions(RolloutConfig(model=str(policy_folder), engine="an_engine_of_mine:begin"), served) is None
