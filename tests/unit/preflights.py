"""Helpers that check a file before a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.commands.checks.preflight import Inputs, preflight
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError

ROOT = Path(__file__).parents[2]


SUM = "orchestrator.data.max_prompt_length + orchestrator.sampling.max_new_tokens"


def checked(raw: dict[str, Any], folder: Path) -> Inputs:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    return preflight(Deployment.load(path, check_services=True))


def problems(raw: dict[str, Any], folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(raw, folder)
    return str(caught.value).splitlines()


def args(raw: dict[str, Any], name: str) -> dict[str, Any]:
    actual: dict[str, Any] = next(a["args"] for a in raw["applications"] if a["name"] == name)
    return actual
