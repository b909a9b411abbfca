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


def refused(raw: dict[str, Any], folder: Path, *starts: str) -> None:
    """Checks that the file is refused in as many lines as there are `starts`, each with its field and value first."""
    lines = problems(raw, folder)
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=False)] == list(starts)
    assert len(lines) == len(starts), lines


def args(raw: dict[str, Any], name: str) -> dict[str, Any]:
    actual: dict[str, Any] = application(raw, name)["args"]
    return actual


def application(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in raw["applications"] if entry["name"] == name)
    return found


def ask(raw: dict[str, Any], name: str, **resources: Any) -> dict[str, Any]:
    """Sets what each replica of a service asks of Ray."""
    application(raw, name)["deployments"][0]["ray_actor_options"] = resources
    return resources
