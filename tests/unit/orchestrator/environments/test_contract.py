"""Environments named by import path, as reward functions are."""

import sys
from pathlib import Path

import pytest

from examples.second_try import SecondTry
from orchestrator.environments.config import EnvironmentConfig
from orchestrator.environments.contract import load_environment
from quartet.config.base import ConfigError

FIELD = "orchestrator.environment.kind"
GOOD = """
from orchestrator.environments.contract import Environment


class Silent(Environment):
    def answer(self, turn):
        return None


class Picky(Silent):
    def __init__(self):
        raise OSError("no such tool")


class Leaving(Silent):
    def __init__(self):
        raise SystemExit(0)


class Unfinished(Environment):
    pass


class Versioned(Silent):
    identity = "tool 3"


class Reading(Silent):
    @property
    def identity(self):
        with open(__file__ + ".version") as file:
            return file.read()


class Numbered(Silent):
    identity = 3


class Named(Silent):
    tools = ["find"]


class Called(Silent):
    def tools(self):
        return []
"""


def test_the_example_is_found_by_its_path() -> None:
    environment = load_environment("examples.second_try:SecondTry")
    assert isinstance(environment, SecondTry)
    assert environment.name == "examples.second_try:SecondTry"
    assert environment.identity == SecondTry().identity


def test_its_identity_follows_from_its_source_unless_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found: list[str] = []
    for source in (GOOD, GOOD.replace("return None", "return 'again'")):
        module = f"environment_{len(found)}_of_a_user"
        (tmp_path / f"{module}.py").write_text(source)
        found.append(load_environment(f"{module}:Silent").identity)
        assert load_environment(f"{module}:Versioned").identity == "tool 3"
        environment = load_environment(f"{module}:Silent")
        # The file is saved while a run goes on with the one that was imported.
        (tmp_path / f"{module}.py").write_text(source + "# changed")
        assert environment.identity == found[-1]
        del sys.modules[module]
    assert len({*found}) == 2
    assert all(len(digest) == 64 for digest in found)


def test_an_identity_of_its_own_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reading_of_a_user.py").write_text(GOOD)
    version = tmp_path / "reading_of_a_user.py.version"
    version.write_text("tool 3")
    environment = load_environment("reading_of_a_user:Reading")
    version.write_text("tool 4")
    assert environment.identity == "tool 3"
    assert load_environment("reading_of_a_user:Reading").identity == "tool 4"
    version.unlink()
    assert environment.identity == "tool 3"
    with pytest.raises(ConfigError, match=rf"^{FIELD}: reading_of_a_user:Reading\(\) fails with FileNotFoundError"):
        load_environment("reading_of_a_user:Reading")
    del sys.modules["reading_of_a_user"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a_module_that_is_not_there:Silent", "should be package.module:name, but cannot be imported"),
        ("environment_of_a_user:Missing", "cannot be imported"),
        ("environment_of_a_user:Picky", r"environment_of_a_user:Picky\(\) fails with OSError: no such tool"),
        ("environment_of_a_user:Leaving", r"environment_of_a_user:Leaving\(\) fails with SystemExit: 0"),
        ("environment_of_a_user:Unfinished", "fails with TypeError: .*abstract"),
        ("environment_of_a_user:Numbered", "environment_of_a_user:Numbered.identity should be text, got 3"),
        ("environment_of_a_user:Named", "environment_of_a_user:Named.tools should be a list of JSON schemas"),
        ("environment_of_a_user:Called", "environment_of_a_user:Called.tools should be a list of JSON schemas"),
        ("posixpath:basename", "should be a class of Environment"),
        ("builtins:dict", "should be a class of Environment"),
    ],
)
def test_what_is_no_environment_is_told_with_its_field(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "environment_of_a_user.py").write_text(GOOD)
    monkeypatch.delitem(sys.modules, "environment_of_a_user", raising=False)
    with pytest.raises(ConfigError, match=f"^{FIELD}: .*{said}"):
        load_environment(path)


def test_bounds_of_a_conversation() -> None:
    two = EnvironmentConfig(kind="a:B")
    assert (two.max_turns, two.longest(10)) == (2, 30)
    assert EnvironmentConfig(kind="a:B", max_turns=4, max_tokens=77).longest(10) == 77
    # 3 attempts of 60 s, after which 30 s are left to clean up, and pauses of 1 and 2 s between them.
    assert 3 * 90 + 1 + 2 <= two.longest_answer_s(1) == two.longest_answer_s(64) < 4 * 90
    # Of 129 that ask together, 64 are answered at a time: the last one waits for two others, at each attempt.
    assert 3 * 2 * 90 + 1 + 2 <= two.longest_answer_s(65) < two.longest_answer_s(129) < 4 * 3 * 90
    with pytest.raises(ConfigError, match=r"environment\.max_turns"):
        EnvironmentConfig.parse({"kind": "a:B", "max_turns": 1}, "environment")
    with pytest.raises(ConfigError, match=r"environment\.kind: should be module:Class"):
        EnvironmentConfig.parse({"kind": "print(1)"}, "environment")
