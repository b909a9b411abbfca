"""Runs a command for a limited time: one that hangs must not take the time of those after it."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "QUARTET_MARK"
"""Environment variable of a command that runs marked, and of the processes that it starts."""
SIDE = "QUARTET_BENCHMARK_SIDE"
"""The same of one side of a benchmark, which may run within a command that is marked."""


def python_path() -> str:
    """PYTHONPATH with the project's root before what is in it: libraries may be there that are nowhere else."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def ended(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """The finished command, with what it printed.

    Raises:
        RuntimeError: it was not done in time, and was killed with all processes of its session.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        _kill_session(process.pid)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RuntimeError(f"{' '.join(command[:3])} was not done after {timeout_s:g} s, and was killed") from None
    return subprocess.CompletedProcess(command, process.returncode, printed, errors)


def lines(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Generator[str]:
    """Yields the lines that a command prints, as they come. It is killed with all processes of its session where the
    caller leaves it.

    Raises:
        RuntimeError: it failed, with the last line of its errors and those before it, or was not done in time and
            was killed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        late = threading.Timer(timeout_s, _kill_session, [process.pid])
        late.start()
        try:
            assert process.stdout is not None
            yield from process.stdout
            status = process.wait()
        finally:
            late.cancel()
            _kill_session(process.pid)
            process.wait()
        if status:
            errors.seek(0)
            told = errors.read()[-4000:].strip()
            last = told.rpartition("\n")[2]
            raise RuntimeError(f"ended with {status}: {last}\n{told}")


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def logged(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, mark: str, timeout_s: float, log: Path
) -> int | None:
    """Runs a command in `folder`, in a process group of its own, and writes to `log` what it prints.

    All processes that it leaves are killed at its end, those too that went into sessions of their own, as Ray's do.

    Returns:
        Its exit status; None if it was not done in time, and was killed.
    """
    with log.open("wb") as file:
        # Not in a session of its own: a machine that ends what a command has left looks for the command's session.
        process = subprocess.Popen(
            command,
            env={**environment, MARK: mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_marked(mark)


def end_marked(mark: str, variable: str = MARK) -> None:
    """Kills the processes whose environment has the mark, and their descendants, whose titles may replace it."""
    for _ in range(5):
        found = marked(mark, variable)
        _send(found, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.2)


def heed_sigterm() -> None:
    """Has SIGTERM end this process by an exception, as Ctrl-C does: by itself it would leave behind what this process
    started, some of it stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def stopped(side: str) -> Iterator[None]:
    """Has all processes of a side stand still meanwhile, while the other has its turn."""
    found = marked(side, SIDE)
    _send(found, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(found, signal.SIGCONT)


def processor_s(side: str) -> float:
    """Processor time of all processes of a side so far, in seconds."""
    total = 0
    for pid in marked(side, SIDE):
        with suppress(OSError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


def _send(processes: set[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def marked(mark: str, variable: str = MARK) -> set[int]:
    """Numbers of the processes whose environment has the mark, and of their descendants, without this one and ones
    that have ended."""
    wanted = f"{variable}={mark}\0".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(folder.name)] = int(parent)
            if wanted in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
