"""Worker processes, which can be killed: each calls a scorer's function for one batch of pairs at a time."""

import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config.functions import VARIABLE
from quartet.wire.pairs import Pair
from services.reward.scorers import program
from services.reward.scorers.frames import LENGTH, MOST_BYTES, packed, received, rows_of, unpacked

PROGRAM = Path(program.__file__)
START_S = 300.0
"""Longest time that a process may take until its function is imported, in seconds; a function may load a model."""
_END_S = 2.0
"""Longest wait for the end of a process that closed its socket, in seconds."""
_SLACK_S = 1.0
"""Seconds that a coroutine function's own deadlines are ahead of those from outside."""
_LOOKS = 8
"""Looks within a pair's time, whether the function is at another pair already."""
_LOOK_S = 0.01
"""Shortest time between two of them, in seconds."""
PASSED_ON = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "LANGUAGE",
        "LC_ALL",
        "LC_CTYPE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
    ),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS"),
    *("OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "HF_HOME", "HF_HUB_OFFLINE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", VARIABLE),
)
"""Variables of the environment that each worker has, if they are set: none of them is a secret."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a worker process needs to know."""

    function: str
    """`module:name` of the function, or of the one that makes it from `options`."""
    options: Mapping[str, Any] | None
    """Fields of which the function is made; None if it is used as it is."""
    names: Sequence[str]
    """Names of its scores."""
    field: str
    """Key of the configuration at which the function stands."""
    memory_bytes: int
    """Most memory of its own."""
    concurrency: int
    """Most pairs of a coroutine function at the same time."""
    variables: Sequence[str] = ()
    """Further variables of the environment."""


class StartError(Exception):
    """A worker process did not come to the point where it can be called."""


class EndedError(Exception):
    """The process ended amid a call, and how."""

    def __init__(self, how: str, at: int | None, *, called: bool) -> None:
        super().__init__(how)
        self.for_memory = "memory" in how
        """True if it may have been ended since the machine has no memory left."""
        self.at = at
        """The pair at which the function was, if that is known."""
        self.called = called
        """False if it ended before the function was called."""


class LateError(Exception):
    """The function was at one pair, `at`, if that is known, for longer than `seconds`."""

    def __init__(self, seconds: float, at: int | None) -> None:
        super().__init__(f"{seconds:g} s")
        self.seconds = seconds
        self.at = at


class Worker:
    """One process. Nothing of it is left when nothing refers to this object, nor when this process ends."""

    def __init__(self, setting: Setting, *, whole: bool) -> None:
        """Starts the process, which the end of the calling thread would end too. `whole`: the function is checked,
        and its source is read for its identity."""
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("place")
        os.ftruncate(memory, 16)
        self._place = memoryview(mmap.mmap(memory, 16)).cast("q")
        arguments = [str(theirs.fileno()), str(memory), json.dumps(_path())]
        try:
            self._process = subprocess.Popen(
                [_python(), "-P", str(PROGRAM), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env={name: os.environ[name] for name in (*PASSED_ON, *setting.variables) if name in os.environ},
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(memory)
        self._socket = ours
        self.end = weakref.finalize(self, _end, self._process, ours)
        """Kills the process and all that it started."""
        self._calls = 0
        self._slack_s = 0.0
        self._first = packed(
            {
                "function": setting.function,
                "options": setting.options,
                "names": list(setting.names),
                "field": setting.field,
                "memory_bytes": setting.memory_bytes,
                "concurrency": setting.concurrency,
                "whole": whole,
            }
        )

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self.end.alive and self._process.poll() is None

    def started(self) -> str:
        """Waits until the function can be called; returns the text that identifies it, if it was asked for.
        StartError if it cannot be called."""
        self._socket.settimeout(START_S)
        try:
            self._socket.sendall(self._first)
            return self._started(received(self._socket))
        except TimeoutError:
            raise StartError(f"its process has not imported it within {START_S:g} s") from None
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            return self._started(b"")
        finally:
            self._socket.setblocking(False)

    async def starting(self) -> None:
        """The same without blocking."""
        self._socket.setblocking(False)
        try:
            async with asyncio.timeout(START_S):
                self._started(await self._exchanged(self._first))
        except TimeoutError:
            raise StartError(f"its process has not imported it within {START_S:g} s") from None
        except OSError:
            await self._ended()
            self._started(b"")

    def _started(self, frame: bytes) -> str:
        try:
            answer = unpacked(frame) if frame else {"problem": f"its process {self._how()} as it started"}
            if "problem" in answer:
                raise StartError(str(answer["problem"]))
            self._slack_s = _SLACK_S if answer["coroutine"] else 0.0
            return str(answer["source"])
        except (ValueError, TypeError, KeyError):
            raise StartError("its process sent something else than its answer") from None

    async def call(self, pairs: Sequence[Pair], seconds: Sequence[float]) -> Any:
        """The program's answer for these pairs, each of which may take so many seconds; and as `at` the pair at
        which the function was last. The process has to be killed after an error.

        Raises:
            EndedError: it ended.
            LateError: one pair took longer.
        """
        loop = asyncio.get_running_loop()
        self._calls += 1
        self._place[0], self._place[1] = 0, program.NOWHERE
        frame = packed({"call": self._calls, "pairs": rows_of(pairs), "seconds": list(seconds)})
        exchanged = loop.create_task(self._exchanged(frame))
        try:
            seen, since, pause = 0, loop.time(), max(min(seconds) / _LOOKS, _LOOK_S)
            end = since + sum(seconds) + max(seconds)  # of a function that goes round and round
            while True:
                limit = seconds[self._at(len(pairs)) or 0] + self._slack_s
                done, _ = await asyncio.wait({exchanged}, timeout=pause)
                if done:
                    break
                if self._place[0] != seen:
                    seen, since = self._place[0], loop.time()
                    if since > end:
                        raise LateError(limit, None)
                elif loop.time() - since >= limit:
                    raise LateError(limit, self._at(len(pairs)))
            try:
                answer = unpacked(exchanged.result() or b"")
                if answer["call"] != self._calls:
                    raise ValueError
                return answer | {"at": self._at(len(pairs))}
            except (OSError, ValueError, TypeError, KeyError):
                how = await self._ended()
                raise EndedError(how, self._at(len(pairs)), called=self._place[0] > 0) from None
        finally:
            exchanged.cancel()
            await asyncio.wait({exchanged})  # the loop must have forgotten the socket before it is closed

    def _at(self, pairs: int) -> int | None:
        """The pair at which the function is; None if it is at none."""
        at = self._place[1]
        return at if 0 <= at < pairs else None

    async def _exchanged(self, frame: bytes) -> bytes:
        """Sends a message and returns the next one of the process; empty if it ends first."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, frame)
        head = await self._exactly(LENGTH.size)
        size = LENGTH.unpack(head)[0] if head else 0
        if size > MOST_BYTES:
            raise ValueError("too long")
        return await self._exactly(size) if size else b""

    async def _exactly(self, size: int) -> bytes:
        loop, got = asyncio.get_running_loop(), bytearray()
        while len(got) < size:
            part = await loop.sock_recv(self._socket, min(size - len(got), 1 << 20))
            if not part:
                return b""
            got += part
        return bytes(got)

    async def _ended(self) -> str:
        """Says how the process ended, or that it goes on although it sent something else than an answer."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _END_S
        while self._process.poll() is None and loop.time() < until:
            await asyncio.sleep(0.005)
        return self._how()

    def _how(self) -> str:
        code = self._process.poll()
        if code is None:
            return "closed its connection or sent something else than an answer"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        memory = ", as where the machine runs out of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {name}{memory}"


def _python() -> str:
    """The interpreter of this installation: sys.executable may be a program that Ray was given in its place."""
    own = os.path.join(sys.prefix, "bin", "python3")
    return own if os.path.exists(own) else sys.executable


def _path() -> list[str]:
    """The folders in which this process looks for modules, and that of the user's."""
    return [*(each or os.getcwd() for each in sys.path), *filter(None, [os.environ.get(VARIABLE)])]


def _end(process: "subprocess.Popen[bytes]", ours: socket.socket) -> None:
    """Kills the processes of the worker's session; also called when the interpreter ends. Does not wait for them:
    they are reaped as the next one starts."""
    ours.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.poll()


class Workers:
    """The workers of a scorer: those that rest, and the rule by which others are started."""

    def __init__(self, setting: Setting) -> None:
        """Starts the first one and waits for it. StartError if it cannot be called."""
        self._setting = setting
        first = Worker(setting, whole=True)
        self.source = first.started()
        """The text that identifies the function."""
        self.problem = ""
        """The reason why the last worker that was started cannot be called; empty if it can."""
        self._resting = [first]
        self._coming: asyncio.Task[None] | None = None

    async def call(self, pairs: Sequence[Pair], seconds: Sequence[float], *, fresh: bool = False) -> Any:
        """The answer of a worker, with `fresh` of one that has answered nothing yet; raises as
        `Worker.call` does, and StartError. After an error, and where this call is cancelled, the worker is killed,
        and the next one is started."""
        if fresh and self._resting:
            self._resting.pop().end()  # in whose place there is one more
        worker = await (self._new() if fresh else self._taken())
        answered = False
        try:
            answer = await worker.call(pairs, seconds)
            answered = not answer.get("ends")
            return answer
        finally:
            if answered:
                self._resting.append(worker)
            else:
                worker.end()
                if not self._resting and self._coming is None:
                    self._coming = asyncio.get_running_loop().create_task(self._come())

    async def _taken(self) -> Worker:
        """A worker that rests, the one that is being started, or a new one."""
        while True:
            while self._resting:
                if (worker := self._resting.pop()).alive:
                    return worker
                worker.end()
            if self._coming is None:
                return await self._new()
            await asyncio.wait({self._coming})

    async def _come(self) -> None:
        try:
            self._resting.append(await self._new())
        except StartError:
            pass  # `problem` says it; the next call tries again
        finally:
            self._coming = None

    async def _new(self) -> Worker:
        worker = Worker(self._setting, whole=False)
        try:
            await worker.starting()
        except BaseException as error:
            worker.end()
            if isinstance(error, StartError):
                self.problem = str(error)
            raise
        self.problem = ""
        return worker
