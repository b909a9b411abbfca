"""The share of tests that a program passes, each in a process of its own (`sandbox`)."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.wire.pairs import Pair
from services.reward.scorers.kinds import sandbox
from services.reward.scorers.kinds.answers import Given, UnusableError, by_pairs, extracting, regex_seconds

_MOST_OUTPUT = 1 << 20
"""Most bytes of a test's output that are compared."""
_TRIED = "print(7)"


class NotBegunError(RuntimeError):
    """A program could not be begun, through no fault of its own."""


class Sandbox:
    """Runs programs within limits."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seconds = float(options["test_s"])
        self._limits = {
            "memory_bytes": options["test_memory_mib"] << 20,
            "cpu_s": max(1, round(self._seconds + 0.5)),
            "network": options["network"],
        }

    def run(self, program: str, given: str, seconds: float, *, may_exit: bool, begin_s: float) -> tuple[bool, str]:
        """Runs a program, with this standard input, for so many seconds at most; returns whether it came to its end,
        which sys.exit is too with `may_exit`, and its output. NotBegunError if its process is not ready for it in
        `begin_s` seconds."""
        mark = secrets.token_hex(16)
        with _folder() as place:
            room = place / "room"
            room.mkdir()
            for name, content in (("program.py", program), ("input", given)):
                (place / name).write_bytes(content.encode(errors="surrogatepass"))
            own = {"program": str(place / "program.py"), "folder": str(room), "may_exit": may_exit}
            with (place / "input").open("rb") as stdin, (place / "output").open("wb") as stdout:
                ours, theirs = os.pipe()
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", sandbox.__file__, str(theirs), json.dumps(self._limits | own)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs,),
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(room), "TMPDIR": str(room)}
                    | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
                    | {sandbox.MARK: mark},
                    start_new_session=True,
                )
                os.close(theirs)
                with os.fdopen(ours, "rb", buffering=0) as told:
                    try:
                        ready, _, _ = select.select([told], [], [], begin_s)
                        if not ready or told.read(1) != sandbox.BEGUN:
                            raise NotBegunError("the process of a test ended, or took too long, before the test")
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(seconds)
                    finally:
                        _kill(process)
                    os.set_blocking(told.fileno(), False)
                    ended = (told.read(len(mark)) or b"") == mark.encode()
            with (place / "output").open("rb") as output:
                return ended and process.returncode == 0, output.read(_MOST_OUTPUT).decode(errors="replace")


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], list[Given]]:
    """The scorer's function. RuntimeError if programs cannot be run within the limits here."""
    box, most = Sandbox(options), options["most_tests"]
    tried = None
    with contextlib.suppress(NotBegunError):
        tried = box.run(_TRIED, "", 60.0, may_exit=False, begin_s=60.0)
    if tried != (True, "7\n"):
        raise RuntimeError(
            "a program cannot be run within the limits here"
            + (
                ""
                if options["network"]
                else "; where the kernel gives processes no network of their own, set network: true"
            )
        )

    extract = extracting(options["extract"], regex_seconds(options))

    def score(response: str, tests: Sequence[tuple[str, str, str | None]]) -> float:
        found = extract(response)
        program = response if found is None else found
        # What is left beside the tests' time, so that the process is not killed before.
        begin_s = 0.15 * options["pair_timeout_s"]
        ends, passed = time.monotonic() + 0.8 * options["pair_timeout_s"], 0
        for asserts, given, wanted in tests[:most]:
            left = min(options["test_s"], ends - time.monotonic())
            if left <= 0:
                break
            text = f"{program}\n\n{asserts}" if asserts else program
            ended, output = box.run(text, given, left, may_exit=wanted is not None, begin_s=begin_s)
            if ended and (wanted is None or _lines(output) == _lines(wanted)):
                passed += 1
            elif options["all_or_nothing"]:
                break
        share = passed / len(tests[:most])
        return float(share == 1) if options["all_or_nothing"] else share

    return by_pairs(score, {**options, "extract": ""}, expected=lambda value: [*_tests(value)])


def _tests(value: Any) -> Iterator[tuple[str, str, str | None]]:
    """(asserts, input, output) of each test; the output is None for asserts."""
    found: Any = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(value)
    if isinstance(found, Mapping):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
            raise UnusableError("holds no `inputs` and as many `outputs`")
        yield from (("", _text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True))
    elif isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        yield from ((each, "", None) for each in found)
    elif isinstance(found, str) and found.strip():
        yield (found, "", None)
    else:
        raise UnusableError("holds no tests")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(output: str) -> list[str]:
    """The lines without blanks at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A new folder, of which nothing is left afterwards, however deep a program has made it."""
    made = tempfile.TemporaryDirectory(prefix="quartet-test-", ignore_cleanup_errors=True)
    try:
        yield Path(made.name)
    finally:
        with contextlib.suppress(RecursionError):
            made.cleanup()
        if os.path.exists(made.name):
            subprocess.run(["rm", "-rf", "--", made.name], check=False, stderr=subprocess.DEVNULL)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
