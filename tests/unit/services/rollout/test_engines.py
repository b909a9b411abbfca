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


async def test_one_in_the_users_folder_is_found_where_python_does_not_look(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of `quartet evaluate --model` is started with -P."""
    (tmp_path / "an_engine_beside_a_file.py").write_text("async def begin(config):\n    return config.model\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    config = RolloutConfig(model=str(policy_folder), engine="an_engine_beside_a_file:begin")
    assert str(await start(config)) == str(policy_folder)
    gone = RolloutConfig(model=str(policy_folder), engine="no_engine_at_all:begin")
    with pytest.raises(ConfigError, match=r"rollout\.args\.engine: .*No module named 'no_engine_at_all'"):
        await start(gone)


def test_vllm_is_the_default(policy_folder: Path) -> None:
    assert kind_of(RolloutConfig(model=str(policy_folder))) == ENGINES["vllm"]


@pytest.mark.parametrize("engine", ["sglang", "", "a b:c", "mine:", ":start", "mine:start()"])
def test_an_unknown_engine_is_refused_by_name(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine: .*vllm"):
        RolloutConfig.parse({"model": "m", "engine": engine}, "rollout")


def test_an_engine_of_the_users_own_has_no_answers_in_openais_protocol(policy_folder: Path) -> None:
    served: Any = None
    assert completions(RolloutConfig(model=str(policy_folder), engine="an_engine_of_mine:begin"), served) is None
