"""Functions named by import path."""

import posixpath
import re
import sys
from pathlib import Path

import pytest

from quartet.config.base import ConfigError
from quartet.config.functions import VARIABLE, load_function


def test_a_function_by_its_path() -> None:
    assert load_function("posixpath:basename")(["x"][0]) == "x"  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such:f", "function: 'no_such:f' should be package.module:name, but cannot be imported: No module"),
        ("math:no_such_name", "function: 'math:no_such_name' should be package.module:name"),
        ("math", "function: 'math' should be package.module:name"),
        (":f", "function: ':f' should be package.module:name"),
        (".relative:f", "function: '.relative:f' should be package.module:name"),
        ("", "function: '' should be package.module:name"),
        ("math:pi", "function: 'math:pi' is not a function"),
        ("asyncio:sleep", "function: 'asyncio:sleep' is an async function; write it with def"),
        ("tests.scorers:waiting", "function: 'tests.scorers:waiting' is an async function; write it with def"),
        ("operator:add", "function: 'operator:add' should take one argument, a sequence of pairs, but takes (a, b"),
        ("posixpath:no", f"has no attribute 'no' (the module is {posixpath.__file__})"),
    ],
)
def test_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_function(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, as the services know it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_module_of_the_users_folder_is_found_and_hides_no_other(folder: Path) -> None:
    (folder / "rewards_of_a_user.py").write_text("def score(pairs):\n    return [7.0 for _ in pairs]\n")
    (folder / "posixpath.py").write_text("raise AssertionError('hides a part of Python')\n")
    assert load_function("rewards_of_a_user:score")(["a", "b"]) == [7.0, 7.0]  # type: ignore[list-item]
    assert sys.path[-1] == str(folder)
    assert sys.path.count(str(folder)) == 1


def test_without_a_service_it_is_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts may lie elsewhere."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(folder)
    (folder / "rewards_beside_a_file.py").write_text("def score(pairs):\n    return [8.0 for _ in pairs]\n")
    assert load_function("rewards_beside_a_file:score")(["a"]) == [8.0]  # type: ignore[list-item]
    assert sys.path[-1] == str(folder)


def test_a_module_that_ends_the_program_is_the_users_mistake(folder: Path) -> None:
    (folder / "script_of_a_user.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="importing script_of_a_user fails with SystemExit: 0"):
        load_function("script_of_a_user:score")
