"""Divides the tests among the processes of `pytest -n`; a plugin of pytest.

What takes long to start is started once: all tests that share it run in one process, in their order. Elsewhere a
file's tests stay together.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_SHARING = {"integration": "quartet", "e2e": "quartet", "engine": "engines"}
"""Folder of tests/ -> the thing that its tests share: one quartet, or one process for engines."""
_ORDER = ("integration", "e2e", "processes", "engine", "unit")
"""Folders of tests/, those first that take longest. Services are tried as they were deployed, then trained with.
Those of `_NICENESS` are last, since a process cannot raise its priority again, and at theirs deadlines pass."""
_NICENESS = {"engine": 19, "unit": 19}
"""Tests that compute, by folder: they give way to services, which Ray runs at 5, as the tests of those take longest
together, and to tests that wait for deadlines."""


def together(test: str) -> str:
    """The name of the group that a test, given by its id, belongs to."""
    return _SHARING.get(_folder(test)) or test.split("::", 1)[0]


def _folder(test: str) -> str:
    """The folder of tests/ that a test is in."""
    return test.split("/", 2)[1]


class Division(LoadScopeScheduling):  # type: ignore[misc]  # xdist's classes come untyped
    """Hands out groups of tests in the order in which they are collected."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Division:
    """Replaces what `--dist` names."""
    config.option.loadscopereorder = False
    return Division(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves units alone that have no test with the mark which `-m "processes ..."` asks for, as importing
    all takes each process of pytest ten seconds more."""
    asked = str(config.option.markexpr).startswith("processes")
    unit = "unit" in collection_path.parts and collection_path.match("test_*.py")
    return (asked and unit and "mark.processes" not in collection_path.read_text()) or None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts folders into their order, and marks the tests of every folder but `unit`: all of them start processes or
    use a quartet."""
    items.sort(key=lambda item: _ORDER.index(_folder(item.nodeid)))
    for item in items:
        if _folder(item.nodeid) != "unit":
            item.add_marker("processes")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lowers this process's priority, for good, where its tests compute."""
    niceness = _NICENESS.get(_folder(item.nodeid), 0)
    if "PYTEST_XDIST_WORKER" in os.environ and niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
