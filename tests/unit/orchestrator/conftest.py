"""A configuration of the orchestrator that several rooms start from."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def section(model: str) -> dict[str, Any]:
    """The least that an `orchestrator:` section needs."""
    policy = {"model": model, "optimizer": {"learning_rate": 1e-4}}
    return {"name": "run", "data": {"path": "prompts"}, "policy": policy}
