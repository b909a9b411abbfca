"""The search of logs for processes that ended by a fault in native code. Retries hide such an end from the tests.

Also a plugin of pytest: it fails a run in whose logs there is such a process, though every test passed.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# Not the bare names: when a worker is killed, Ray lists what else it might have died of.
_CRASH = re.compile(r"\*\*\* SIG(SEGV|BUS|ILL|FPE) received|Fatal Python error: (Segmentation|Bus error|Illegal)")
_LOGS = {".log", ".out", ".err"}
_FOUND = pytest.StashKey[list[str]]()


def crashes(folders: Iterable[Path]) -> list[str]:
    """File, line number and line of each crash in the logs under `folders`."""
    logs = {path.resolve() for folder in folders for path in _files(folder) if path.suffix in _LOGS}
    return [
        f"{path}:{number}: {line}"
        for path in sorted(log for log in logs if log.is_file())
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if _CRASH.search(line)
    ]


def _files(folder: Path) -> Iterator[Path]:
    """All files under it. Folders may come and go meanwhile."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Looks at what Ray wrote, and at all folders of the tests."""
    of_ray = [Path(os.environ["RAY_TMPDIR"])] if "RAY_TMPDIR" in os.environ else []
    of_tests = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    session.config.stash[_FOUND] = crashed = crashes([of_tests, *of_ray])
    if crashed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Names file and line of each crash."""
    crashed = config.stash.get(_FOUND, [])
    if crashed:
        terminalreporter.section("processes that crashed", red=True)
        terminalreporter.write("\n".join([*crashed, ""]))
