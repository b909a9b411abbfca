"""The end of a process, in processes of their own."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
atexit.register(print, "before")  # as a library that is there already
from quartet.threads import ending_quietly
with ending_quietly():
    atexit.register(print, "closed")
    print("done")
    {ends}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ends", "status", "printed"),
    [
        ("pass", 0, ["done", "closed"]),
        ("sys.exit(3)", 3, ["done", "closed"]),
        # Python's own end, which says what was wrong.
        ("sys.exit('no')", 1, ["done", "closed", "before"]),
        ("1 / 0", 1, ["done", "closed", "before"]),
    ],
)
def test_what_was_opened_is_closed_and_python_is_not_taken_apart(ends: str, status: int, printed: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT.format(ends=ends)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (status, printed)
    assert ("ZeroDivisionError" in ended.stderr) == ("1 / 0" in ends)
