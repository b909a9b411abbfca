"""A command of a benchmark that hangs is ended, and libraries named by PYTHONPATH stay within reach."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.ended import MARK, SIDE, end_marked, ended, lines, marked, python_path, stopped

CHILD = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    began = time.monotonic()
    # The child holds the pipes open, so that killing the parent alone would not end the wait for them.
    with pytest.raises(RuntimeError, match="was not done after 1 s"):
        ended([sys.executable, "-c", f"{CHILD}; time.sleep(60)"], os.environ, None, 1)
    assert time.monotonic() - began < 30


def test_one_that_ends_gives_its_output_and_status() -> None:
    done = ended([sys.executable, "-c", "print(1); raise SystemExit(3)"], os.environ, None, 60)
    assert (done.stdout, done.returncode) == ("1\n", 3)


def test_lines_come_before_the_command_has_ended_which_goes_when_they_are_left() -> None:
    program = f"{CHILD}; print(p.pid, flush=True); time.sleep(60)"
    coming = lines([sys.executable, "-c", program], os.environ, 60)
    child = psutil.Process(int(next(coming)))
    coming.close()
    assert child.wait(30) is None or not child.is_running()


@pytest.mark.parametrize(("program", "seconds"), [("raise SystemExit('the reason')", 60), ("time.sleep(60)", 1)])
def test_lines_of_a_command_that_fails_or_hangs_end_in_an_error(program: str, seconds: float) -> None:
    coming = lines([sys.executable, "-c", f"import time; print(1, flush=True); {program}"], os.environ, seconds)
    assert next(coming) == "1\n"
    with pytest.raises(RuntimeError, match="the reason" if seconds > 1 else "ended with -9"):
        next(coming)


def test_a_side_stands_still_while_the_other_has_its_turn() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    sides = [subprocess.Popen(command, env=os.environ | {SIDE: side}) for side in ("one", "other")]

    one, other = (each.pid for each in sides)
    try:
        with stopped("one"):
            os.waitid(os.P_PID, one, os.WSTOPPED)
            assert psutil.Process(other).status() != psutil.STATUS_STOPPED
        os.waitid(os.P_PID, one, os.WCONTINUED)
    finally:
        for each in sides:
            each.kill()
            each.wait()


def test_the_processes_of_a_side_end_and_no_others() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    one, other = (subprocess.Popen(command, env={variable: "mark of a test"}) for variable in (SIDE, MARK))
    try:
        end_marked("mark of a test", SIDE)
        assert one.wait(10) < 0
        assert marked("mark of a test") == {other.pid}
    finally:
        for each in (one, other):
            each.kill()
            each.wait()


def test_the_root_comes_before_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/libraries")
    root, *others = python_path().split(os.pathsep)
    assert os.path.isfile(os.path.join(root, "benchmarks", "rollout.py"))
    assert others == ["/libraries"]
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == root
