"""The environment that all processes of a head inherit."""

import os
from pathlib import Path

import pytest

from orchestrator.deployment.head import _environment
from services.common.config.functions import VARIABLE


@pytest.mark.parametrize("given", [None, "/mine"])
def test_modules_of_the_current_folder_hide_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Functions are found by a variable of their own; PYTHONPATH, which Python searches first, stays the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given:
        monkeypatch.setenv("PYTHONPATH", given)
    environment = _environment()
    assert environment.get("PYTHONPATH") == given == os.environ.get("PYTHONPATH")
    assert environment[VARIABLE] == str(tmp_path)
