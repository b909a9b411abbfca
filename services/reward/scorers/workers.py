"""Worker processes, which can be killed: each calls a scorer's function for one batch of pairs at a time."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quartet.config.functions import VARIABLE
from quartet.wire.pairs import Pair
from services.reward.scorers import program
from services.reward.scorers.frames import LENGTH, MOST_ANSWER, packed, received, rows_of, unpacked
from services.reward.scorers.program import ENDED, NOWHERE, PAIR, PID, STEPS

PROGRAM = Path(program.__file__)
START_S = 300.0
"""Longest time that a process may take until its function is imported, in seconds; a function may load a model."""
_LATE = f"importing its module takes longer than {START_S:g} s; load what takes long at the function's first call"
_END_S = 2.0
"""Longest wait for the end of a process that closed its socket, in seconds."""
_SLACK_S = 1.0
"""Seconds that a coroutine function's own deadlines are ahead of those from outside."""
_FORKED_S = 0.2
"""Seconds between two looks after a worker that is being forked."""
_LOOKS = 8
"""Looks within a pair's time, whether the function is at another pair already."""
_LOOK_S = 0.01
"""Shortest time between two of them, in seconds."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("VIRTUAL_ENV", "LD_LIBRARY_PATH"),
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
    variables: Sequence[str]
    """Further variables of the environment."""
    process: bool
    """True if it may return a ProcessReward for a pair."""


class StartError(Exception):
    """A worker process did not come to the point where it can be called."""


class EndedError(Exception):
    """The process ended amid a call, and how."""

    def __init__(self, how: str, at: int | None, *, called: bool, with_origin: bool) -> None:
        super().__init__(how)
        self.at = at
        """The pair at which the function was, if that is known."""
        self.called = called
        """False if it ended before the function was called."""
        self.with_origin = with_origin
        """True if it ended as the process did of which it was forked, which another worker may have killed."""


class LateError(Exception):
    """The function was at one pair, `at`, if that is known, for longer than `seconds`."""

    def __init__(self, seconds: float, at: int | None) -> None:
        super().__init__(f"{seconds:g} s")
        self.seconds = seconds
        self.at = at


class Origin:
    """The process of which workers are forked. It is killed, and they with it, when nothing refers to this object and
    when this process ends."""

    def __init__(self, setting: Setting, *, ahead: bool, checked: bool) -> None:
        """Starts the process, which the end of the calling thread would end too. With `ahead` it imports the
        function itself, else each worker does; `checked` if that has been done before."""
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [_python(), "-P", str(PROGRAM), str(theirs.fileno()), json.dumps(_path())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in (*PASSED_ON, *setting.variables) if name in os.environ},
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.end = weakref.finalize(self, _end_origin, self._process, self._socket)
        """Kills the process."""
        self._answer: Any = None
        self._socket.sendall(packed(asdict(setting) | {"ahead": ahead, "checked": checked}))

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self.end.alive and self._process.poll() is None

    def go_on(self) -> None:
        """Has the process go on, which a worker may have stopped."""
        self._process.send_signal(signal.SIGCONT)

    def started(self) -> tuple[str, bool]:
        """Waits until it has started; returns the text that identifies the function, if it has imported it, and
        whether workers may be forked after that. StartError if the function cannot be called."""
        try:
            if self._answer is None:
                self._socket.settimeout(START_S)
                self._answer = unpacked(received(self._socket))
            if "problem" not in self._answer:
                return str(self._answer["source"]), bool(self._answer["forks"])
        except TimeoutError:
            raise StartError(_LATE) from None
        except (OSError, ValueError, TypeError, KeyError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            raise StartError(_not_imported(_how(self._process.poll()))) from None
        raise StartError(str(self._answer["problem"]))

    def fork(self, sock: socket.socket, memory: int) -> None:
        """Has a worker forked that has this socket and memory, as soon as it has started itself."""
        with contextlib.suppress(OSError):  # it has ended, of which the worker's socket tells
            socket.send_fds(self._socket, [b"."], [sock.fileno(), memory], socket.MSG_DONTWAIT)


class Worker:
    """One process. It is killed when nothing refers to this object, and when this process ends."""

    def __init__(self, origin: Origin) -> None:
        """Does not wait for the process."""
        self._origin = origin
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        memory = os.memfd_create("place")
        os.ftruncate(memory, program.PLACE_BYTES)
        origin.fork(theirs, memory)
        theirs.close()
        self._place = program.shared(memory)
        self.end = weakref.finalize(self, _end, self._place, self._socket)
        """Kills the process and all of its session."""
        self._calls = 0
        self._started = False
        self._slack_s = 0.0

    @property
    def unused(self) -> bool:
        """True until it is called."""
        return not self._calls

    def wait(self) -> None:
        """Blocks until the process has something to say about its start."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(START_S * 1000)

    async def ready(self, source: str) -> bool:
        """Waits until the function, which this text identifies, can be called. False if the process has ended since
        it could, or with its origin; StartError if it cannot be called. The process is killed unless it is ready."""
        ready = False
        try:
            ready = self._rests() if self._started else await self._start(source)
            return ready
        finally:
            if not ready:
                self.end()

    async def _start(self, source: str) -> bool:
        first = asyncio.ensure_future(self._received())
        try:
            async with asyncio.timeout(START_S):
                while not (await asyncio.wait({first}, timeout=_FORKED_S))[0]:
                    self._origin.go_on()
                frame = first.result()
        except TimeoutError:
            raise StartError(_LATE) from None
        except (OSError, ValueError):
            frame = b""
        finally:
            first.cancel()
            await asyncio.wait({first})  # as in `call`
        try:
            answer = unpacked(frame) if frame else {"problem": _not_imported(await self._ended())}
            if not frame and not self._origin.alive:
                self._origin.started()
                return False
            if "problem" in answer:
                raise StartError(str(answer["problem"]))
            if answer["source"] != source:
                raise StartError("it is no longer what it was when the service started; start the service again")
            self._slack_s = _SLACK_S if answer["coroutine"] else 0.0
        except (ValueError, TypeError, KeyError):
            raise StartError("its process sent something else than its answer") from None
        self._started = True
        return True

    def _rests(self) -> bool:
        """True if the process is there, and has sent nothing unasked."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._code() is None
        except OSError:
            pass
        return False

    async def call(self, pairs: Sequence[Pair], seconds: Sequence[float]) -> Any:
        """The program's answer for these pairs, each of which may take so many seconds; and as `at` the pair at
        which the function was last. The process has to be killed after an error.

        Raises:
            EndedError: it ended.
            LateError: one pair took longer.
        """
        loop = asyncio.get_running_loop()
        self._calls += 1
        self._place[STEPS], self._place[PAIR] = 0, NOWHERE
        frame = packed({"call": self._calls, "pairs": rows_of(pairs), "seconds": list(seconds)})
        exchanged = loop.create_task(self._exchanged(frame))
        try:
            seen, since, pause = 0, loop.time(), max(min(seconds) / _LOOKS, _LOOK_S)
            end = since + sum(seconds) + max(seconds)  # of a function that goes round and round
            while True:
                at = self._at(len(pairs))
                # A function that is at none works for all of them.
                limit = (max(seconds) if at is None else seconds[at]) + self._slack_s
                ended = self._code() is not None  # of which the socket says nothing where the function has forked
                done, _ = await asyncio.wait({exchanged}, timeout=pause)
                if done or ended:
                    break
                if self._place[STEPS] != seen:
                    seen, since = self._place[STEPS], loop.time()
                    if since > end:
                        raise LateError(limit, None)
                elif loop.time() - since >= limit:
                    raise LateError(limit, self._at(len(pairs)))
            try:
                answer = unpacked(exchanged.result() if exchanged.done() else b"")
                if answer["call"] != self._calls:
                    raise ValueError
                return answer | {"at": self._at(len(pairs))}
            except (OSError, ValueError, TypeError, KeyError):
                how, called = await self._ended(), self._place[STEPS] > 0
                with_origin = not self._place[ENDED] and not self._origin.alive
                raise EndedError(how, self._at(len(pairs)), called=called, with_origin=with_origin) from None
        finally:
            exchanged.cancel()
            await asyncio.wait({exchanged})  # the loop must have forgotten the socket before it is closed

    def _at(self, pairs: int) -> int | None:
        """The pair at which the function is; None if it is at none."""
        at = self._place[PAIR]
        return at if 0 <= at < pairs else None

    async def _exchanged(self, frame: bytes) -> bytes:
        """Sends a message and returns the next one of the process; empty if it ends first."""
        await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        return await self._received()

    async def _received(self) -> bytes:
        head = await self._exactly(LENGTH.size)
        size = LENGTH.unpack(head)[0] if head else 0
        if size > MOST_ANSWER:
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

    def _code(self) -> int | None:
        """The exit code of the process, or less than 0 the signal that has ended it; None while it is there."""
        if self._place[ENDED]:
            return os.waitstatus_to_exitcode(self._place[ENDED] - 1)
        self._origin.go_on()
        return None if self._origin.alive else -signal.SIGKILL

    async def _ended(self) -> str:
        """Says how the process ended, or that it goes on although it sent something else than an answer."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _END_S
        while self._code() is None and loop.time() < until:
            await asyncio.sleep(0.005)
        return _how(self._code())


def _how(code: int | None) -> str:
    """Says how a process ended, by its exit code, or less than 0 by the signal; None if it goes on."""
    if code is None:
        return "closed its connection or sent something else than an answer"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    memory = ", as where the machine runs out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{memory}"


def _not_imported(how: str) -> str:
    return f"the process that was to import it {how}; what it wrote is in the service's log"


def _python() -> str:
    """The interpreter of this installation: sys.executable may be a program that Ray was given in its place."""
    own = os.path.join(sys.prefix, "bin", "python3")
    return own if os.path.exists(own) else sys.executable


def _path() -> list[str]:
    """The folders in which this process looks for modules, and that of the user's."""
    return [*(each or os.getcwd() for each in sys.path), *filter(None, [os.environ.get(VARIABLE)])]


def _end_origin(process: "subprocess.Popen[bytes]", ours: socket.socket) -> None:
    """Kills the origin and all below it; also called when the interpreter ends. Does not wait for it: it is reaped as
    the next one starts."""
    below = _below(process.pid) if process.poll() is None else set()
    process.kill()
    ours.close()
    process.poll()
    for each in below:  # its workers end with it, but not what they have started
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def _below(process: int) -> set[int]:
    """The children of a process, and theirs."""
    found, new = set[int](), program.children(process)
    while new:
        found |= new
        new = set[int]().union(*map(program.children, new)) - found
    return found


def _end(place: "memoryview[int]", ours: socket.socket) -> None:
    """Kills the processes of the worker's session; one that is not there yet finds its socket closed."""
    ours.close()
    if place[PID]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(place[PID], signal.SIGKILL)


class Workers:
    """The workers of a scorer: those that rest, and the rule by which others are started."""

    def __init__(self, setting: Setting) -> None:
        """Starts the first one, once the function is imported. StartError if it cannot be called."""
        self._setting = setting
        self._origin = Origin(setting, ahead=True, checked=False)
        self.source, self._ahead = self._origin.started()
        """The text that identifies the function."""
        self.problem = ""
        """The reason why the last worker that was started cannot be called; empty if it can."""
        if not self._ahead:
            self._origin = Origin(setting, ahead=False, checked=True)
        self._resting = [self._new()]
        self._resting[0].wait()

    async def call(
        self, pairs: Sequence[Pair], seconds: Sequence[float], *, fresh: bool = False, alone: bool = False
    ) -> Any:
        """The answer of a worker, with `fresh` of one that has answered nothing yet, with `alone` of one besides that
        no other can end; raises as `Worker.call` does, and StartError. After an error, and where this call is
        cancelled, the worker is killed, and the next one is started."""
        worker = await self._taken(fresh=fresh, alone=alone)
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
                if not self._resting:
                    with contextlib.suppress(StartError):  # of which the next call tells
                        self._resting.append(self._new())

    async def _taken(self, *, fresh: bool, alone: bool) -> Worker:
        """A worker that rests, or a new one."""
        try:
            while True:
                rests = [each for each in self._resting if not fresh or (each.unused and not alone)]
                if not rests and self._resting:
                    self._resting.pop().end()  # in whose place there is one more
                if rests:
                    self._resting.remove(rests[-1])
                worker = rests[-1] if rests else self._new(alone=alone)
                if await worker.ready(self.source):
                    break
        except StartError as error:
            self.problem = str(error)
            raise
        self.problem = ""
        return worker

    def _new(self, *, alone: bool = False) -> Worker:
        try:
            if alone:
                return Worker(Origin(self._setting, ahead=self._ahead, checked=True))
            if not self._origin.alive:
                self._origin = Origin(self._setting, ahead=self._ahead, checked=True)
            return Worker(self._origin)
        except OSError as error:
            raise StartError(f"the machine starts no further process: {error}") from None
