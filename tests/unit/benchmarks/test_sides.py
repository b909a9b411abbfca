"""The sides of a race: an installation is complete or done again, and services end, those of a failed start too."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vs_trl import sides
from benchmarks.vs_trl.sides import Quartet, make_environment


class Installer:
    """uv, whose installations are noted only."""

    def __init__(self) -> None:
        self.installed: list[str] = []
        self.problem: Exception | None = None
        self._run = subprocess.run

    def __call__(self, command: list[str], **options: Any) -> Any:
        if command[1] == "venv":
            return self._run(command, **options)
        if self.problem:
            raise self.problem
        self.installed += [part for part in command if part.startswith("trl==")]
        return None


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Installer:
    made = Installer()
    monkeypatch.setattr(subprocess, "run", made)
    return made


def test_an_installation_that_was_broken_off_is_done_again(installer: Installer, tmp_path: Path) -> None:
    installer.problem = subprocess.CalledProcessError(1, "uv")
    with pytest.raises(subprocess.CalledProcessError):
        make_environment(tmp_path / "trl")
    installer.problem = None
    assert make_environment(tmp_path / "trl").exists()
    assert make_environment(tmp_path / "trl").exists()
    assert installer.installed == [sides.VERSIONS["ppo"]]


def test_an_environment_of_another_version_gets_this_one(
    installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_environment(tmp_path / "trl")
    monkeypatch.setitem(sides.VERSIONS, "ppo", "trl==99")
    make_environment(tmp_path / "trl")
    assert installer.installed[1:] == ["trl==99"]


def test_services_of_a_start_that_failed_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = []

    def quartet(_: Quartet, *arguments: str) -> None:
        called.append(arguments[0])
        if arguments[0] == "up":
            raise RuntimeError("a model does not answer")

    monkeypatch.setattr(Quartet, "_quartet", quartet)
    with pytest.raises(RuntimeError, match="does not answer"), Quartet(tmp_path, {"orchestrator": {}}).served():
        raise AssertionError("never up")
    assert called == ["up", "down"]
