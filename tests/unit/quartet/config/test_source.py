"""The text by which a user's code is identified, of modules that import others."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator import incomplete
from quartet.config import source
from quartet.config.functions import imported
from quartet.config.source import OURS, text_of

FILES = {
    "reward_of_mine.py": "import helper_of_mine\nfrom rules_of_mine import brevity\n\ndef score(pairs): ...\n",
    "helper_of_mine.py": "import json\nimport yaml\n\ndef right(): import late_of_mine\n",
    "late_of_mine.py": "LATE = 1\n",
    "rules_of_mine/__init__.py": "from .words import *\n",
    "rules_of_mine/words.py": "from ..reward_of_mine import score\n",
    "rules_of_mine/brevity.py": "from . import words\nfrom .deep.down import x\n",
    "rules_of_mine/deep/down.py": "import reward_of_mine\nx = 1\n",
    "unused_of_mine.py": "UNUSED = 1\n",
}
"""Modules of a user, some of which import each other."""
USED = sorted({*FILES} - {"unused_of_mine.py"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in {name for name in {*sys.modules} - before if "of_mine" in name}:
        del sys.modules[name]


def written(folder: Path, files: Mapping[str, str], module: str = "reward_of_mine") -> ModuleType:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return importlib.import_module(module)


def test_a_change_of_any_module_that_it_imports_is_one_of_its_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "yaml").mkdir()  # as that of a library's data, which is no module
    function = written(folder, FILES | {"rules_of_mine/words.py": ""}).score
    (folder / "rules_of_mine/words.py").write_text(FILES["rules_of_mine/words.py"])
    text = text_of(function)
    assert text.startswith(FILES["reward_of_mine.py"])
    changing = {}
    for name, before in FILES.items():
        (folder / name).write_text(before + "# changed\n")
        changing[name] = text_of(function) != text
        (folder / name).write_text(before)
    assert changing == {name: name in USED for name in FILES}
    assert text_of(function) == text


def test_the_text_of_a_module_that_imports_none_of_the_users_own_is_its_own(folder: Path) -> None:
    alone = "import json\nimport yaml\nfrom quartet.wire.pairs import Pair\n\ndef score(pairs): ...\n"
    assert text_of(written(folder, {"reward_of_mine.py": alone}).score) == alone


def test_a_module_that_it_imports_and_that_cannot_be_read_is_passed_over(folder: Path) -> None:
    files = {"reward_of_mine.py": "def score(pairs): import helper_of_mine, other_of_mine\n"}
    function = written(folder, files).score
    (folder / "helper_of_mine.py").write_text("def (:\n")
    (folder / "other_of_mine.py").write_bytes(b"# coding: none-such\n")
    assert "def (:" in text_of(function)


@pytest.mark.parametrize("place", ["", "site-packages"], ids=["this Python's", "a user's"])
def test_of_an_installed_module_its_own_package_counts_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    assert Path(pytest.__file__).parents[1].resolve() in source._INSTALLED
    if not place:
        monkeypatch.setattr(source, "_INSTALLED", {folder.resolve()})
    folder /= place
    monkeypatch.syspath_prepend(folder)
    files = {
        "package_of_mine/__init__.py": "",
        "package_of_mine/reward.py": "import library\nfrom . import rules\n\ndef score(pairs): ...\n",
        "package_of_mine/rules.py": "RULES = 1\n",
        "library.py": "LIBRARY = 1\n",
    }
    text = text_of(written(folder, files, "package_of_mine.reward").score)
    assert "RULES = 1" in text
    assert "LIBRARY = 1" not in text


def test_quartets_packages_are_those_that_its_command_knows() -> None:
    assert OURS == incomplete.OURS


def test_code_without_a_text_is_refused() -> None:
    with pytest.raises((OSError, TypeError)):
        text_of(len)


def test_code_is_of_the_text_by_which_it_is_identified_however_soon_that_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of a helper that have the same size, and come within the second in which that before was compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (folder / "reward_of_mine.py").write_text("from helper_of_mine import score\n")
    helper, second = folder / "helper_of_mine.py", 1_800_000_000
    compiled = Path(cache_from_source(str(helper)))

    def scored() -> int:
        score: int = imported("reward_of_mine:score", "field")()
        del sys.modules["reward_of_mine"], sys.modules["helper_of_mine"]
        return score

    for score in (1, 2, 1):
        helper.write_text(f"def score(): return {score}\n")
        os.utime(helper, (second, second))
        assert scored() == score
        os.utime(compiled, (second, second))
    os.utime(compiled, (second + 1, second + 1))  # which holds for no text but the last
    assert scored() == 1
    assert compiled.stat().st_mtime == second + 1
