"""Goes through the plan in the time of one command, and goes on where an earlier command was cut off."""

import fcntl
import importlib
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.ended import end_marked, logged, python_path
from benchmarks.figures import FILES, KEPT, STAGE
from benchmarks.lent.ledger import CUT_OFF, DONE, FAILED, FINAL, NAME, TOO_SLOW, TRIES, Ledger
from benchmarks.lent.stages import CPU_S, PEER, STAGES, Stage
from benchmarks.tails import tails

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # FlashInfer is not packed, and vLLM's sampler would import it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # A machine whose memory grows as it is used shows Ray less than it has, and Ray kills workers.
    "RAY_memory_monitor_refresh_ms": "0",
}
LEAST_S = 5.0
"""Seconds that are left free at the end of a command; on a CPU a stage begins with more left."""
TAIL = 4000
"""Characters of a stage's output that are kept with its outcome."""
LOG = 1 << 20
"""Bytes of a stage's output that are kept in the log of all stages."""


@dataclass(frozen=True, slots=True)
class Command:
    """Options of one command."""

    seconds: float
    """For all its stages."""
    folder: Path
    """Folder of the figures and logs, the same from command to command."""
    spent: float = 0.0
    """Seconds of these that were over before it began, as the installation takes some."""
    copy: Path | None = None
    """Folder that gets figures and logs too."""
    device: str = "auto"
    """cuda, cpu, or auto: cuda if the machine has a GPU."""
    peer: str = sys.executable
    """Python that has TRL in it."""
    only: tuple[str, ...] = ()
    """Names of the stages to go through; none: all."""
    again: tuple[str, ...] = ()
    """Names of stages that are tried again whatever became of them."""


def run(command: Command, stages: Sequence[Stage] = STAGES) -> int:
    """Runs the stages that are due.

    Returns:
        1 if a stage failed or was too slow in this command, else 0.

    Raises:
        ValueError: an option names a stage that the plan does not have, or another device, or leaves no time.
        RuntimeError: another command uses the folder.
    """
    until = time.monotonic() + command.seconds - command.spent
    if not LEAST_S < command.seconds < math.inf:
        raise ValueError(f"--seconds {command.seconds:g}: should be more than {LEAST_S:g}, which are left at the end")
    if command.device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {command.device}: it is auto, cuda or cpu")
    by_name = {stage.name: stage for stage in stages}
    for name in (*command.only, *command.again):
        if name not in by_name:
            raise ValueError(f"{name!r} is not a stage; these are: {'; '.join(by_name)}")
    signal.signal(signal.SIGTERM, _leave)
    with _alone(command.folder):
        return _go_through(command, stages, by_name, until)


def _go_through(command: Command, stages: Sequence[Stage], by_name: Mapping[str, Stage], until: float) -> int:
    folders = [command.folder, *([command.copy] if command.copy else [])]
    ledger = Ledger([folder / NAME for folder in folders])
    for mark in ledger.marks():  # of a command that was killed
        end_marked(mark)
        shutil.rmtree(_scratch(mark), ignore_errors=True)
    gpu = gpus()
    device = ("cuda" if gpu else "cpu") if command.device == "auto" else command.device
    ledger.add("run", device=device, machine=gpu or f"{os.cpu_count()} cores", seconds=command.seconds)
    print(f"{device}: {gpu or 'no GPU'}; {command.seconds:g} s", flush=True)
    for name in command.again:
        ledger.add("again", stage=name)
    wanted = [by_name[name] for name in command.only] if command.only else list(stages)
    gib = memory_gib(gpu) if device == "cuda" else math.inf
    runner = Runner(ledger, command, device, gib, until)
    tries = {stage.name: ledger.tries(stage.name) for stage in wanted}
    # Those that were cut off come last: they may well hang again.
    outcomes = [runner.attempt(stage) for stage in sorted(wanted, key=lambda its: tries[its.name][0] > 0)]
    return int(any(outcome in (FAILED, TOO_SLOW) for outcome in outcomes))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other commands out of the folder: each ends what stages in it have left. RuntimeError if one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:  # not inherited by stages, so that it ends with this process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RuntimeError(
                f"--folder {folder}: the command with process id {file.read()} uses it; wait for its end, or name "
                "another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class Runner:
    """Runs one stage after the other until the command's time is over."""

    def __init__(self, ledger: Ledger, command: Command, device: str, gib: float, until: float) -> None:
        self._ledger, self._device, self._gib, self._until = ledger, device, gib, until
        self._folder = command.folder.resolve()
        self._peer = os.path.abspath(command.peer)  # not resolved: a link in bin makes an environment's Python

    def attempt(self, stage: Stage) -> str:
        """Runs a stage if it is due and fits; its outcome in this command, '' if it did not run."""
        tries, outcome = self._ledger.tries(stage.name)
        if outcome in FINAL:
            print(f"{stage.name}: {outcome} before", flush=True)
            return ""
        left = self._until - time.monotonic() - LEAST_S
        asked = stage.expected_s if self._device == "cuda" else LEAST_S
        missing = [name for name in stage.needs if not self._there(stage, name)]
        if tries >= TRIES:
            return self._skip(stage, f"it was cut off {tries} times; --again runs it once more")
        if missing:
            return self._skip(stage, f"not installed: {', '.join(missing)}")
        if self._gib < stage.gib:
            return self._skip(stage, f"it needs a GPU of {stage.gib:g} GiB, and this one has {self._gib:.0f}")
        if left < asked:
            return self._skip(stage, f"it takes {asked:g} s, and {max(left, 0):.0f} s are left")
        return self._run(stage, left)

    def _there(self, stage: Stage, package: str) -> bool:
        """True if a stage finds this package; another Python is taken to have what is asked of it."""
        importlib.invalidate_caches()
        elsewhere = PEER in stage.gpu and self._peer != sys.executable
        return elsewhere or importlib.util.find_spec(package) is not None

    def _skip(self, stage: Stage, why: str) -> str:
        print(f"{stage.name}: skipped, {why}", flush=True)
        self._ledger.add("skipped", stage=stage.name, why=why)
        return ""

    def _run(self, stage: Stage, left: float) -> str:
        own = stage.limit_s if self._device == "cuda" else CPU_S
        limit = min(own, left)
        mark = uuid.uuid4().hex
        log = self._folder / "stage.log"
        arguments = stage.gpu if self._device == "cuda" else stage.cpu
        words = [self._peer if word == PEER else word for word in arguments]
        files = os.pathsep.join(map(str, self._ledger.paths))
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": python_path(), FILES: files, STAGE: stage.name}
        # A stage that is killed removes neither models nor logs. Ray's sockets allow short paths only.
        scratch = _scratch(mark)
        scratch.mkdir(mode=0o700)
        environment |= {"TMPDIR": str(scratch), "RAY_TMPDIR": str(scratch)}
        # Elsewhere than in TMPDIR, as what one stage compiled or made saves the next ones time.
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "compiled"), KEPT: str(self._folder / "models")}
        self._ledger.add("begun", stage=stage.name, mark=mark, limit_s=round(limit))
        print(f"{stage.name}: at most {limit:.0f} s", flush=True)
        began = time.monotonic()
        status: int | None = None
        outcome = CUT_OFF
        try:
            command = [sys.executable, "-m", stage.module, *words]
            status = logged(command, environment, self._folder, mark, limit, log)
            if status is None:
                outcome = TOO_SLOW if limit == own else CUT_OFF
            else:
                outcome = FAILED if status or self._ledger.failures(stage.name) else DONE
        finally:
            took = time.monotonic() - began
            if outcome != DONE:
                with log.open("a") as file:
                    file.write(tails(scratch))
            shutil.rmtree(scratch, ignore_errors=True)
            tail = self._keep(stage, log)
            self._ledger.add("ended", stage=stage.name, outcome=outcome, status=status, s=round(took, 1), tail=tail)
        print(f"{stage.name}: {outcome} after {took:.0f} s", flush=True)
        if outcome != DONE:
            print(tail, flush=True)
        return outcome

    def _keep(self, stage: Stage, log: Path) -> str:
        """Adds the stage's output to the log of all, and returns its end."""
        output = log.read_bytes() if log.exists() else b""
        for path in self._ledger.paths:
            with path.with_name("log.txt").open("ab") as file:
                file.write(f"==== {stage.name}\n".encode() + output[-LOG:] + b"\n")
        return output.decode(errors="replace")[-TAIL:]


def gpus() -> str:
    """Names of the NVIDIA GPUs of this machine; '' without any."""
    if not shutil.which("nvidia-smi"):
        return ""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""


def memory_gib(gpu: str) -> float:
    """Memory of the smallest of these GPUs; infinite if it is not known."""
    return min((int(mib) / 1024 for mib in re.findall(r", (\d+) MiB", gpu)), default=math.inf)


def _scratch(mark: str) -> Path:
    """The folder for the temporary files of the stage with this mark."""
    return Path("/tmp", f"l-{mark[:8]}")


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the command as an exception does, so that the stage that runs is ended and recorded."""
    raise SystemExit(128 + number)
