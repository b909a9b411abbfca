"""The program of worker processes: each calls a scorer's function for batches of pairs that come through a socket.

`workers.Origin` starts it as a file. This process imports the function, and forks itself for each worker, which so
begins within milliseconds, whatever the module imports; and with what the module was when the service started.
A process with threads or open files of the module's must not be forked: `forks` in its answer then is false, and
another one is started, whose workers import the function themselves. Its arguments are the number of its socket and
the folders in which Python looks for modules.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import mmap
import operator
import os
import reprlib
import resource
import select
import signal
import socket
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from quartet.wire.pairs import Pair

NOWHERE = -1
"""In the place of a pair's index while the function is at none."""
STEPS, PAIR, PID, ENDED = range(4)
"""Places in the memory in which a worker and its origin tell the service: the number of steps that the
function has made, the pair at which it is, the worker's process, and the status with which that ended, plus 1."""
PLACE_BYTES = 32
_MOST_TRACE = 8000
"""Most characters of a traceback, for the service's log."""
_MOST_TEXT = 2000
"""Most characters of what a function gave, and of a reason."""
_NAMING = reprlib.Repr()
_NAMING.maxstring = 80
"""Shows the beginning and the end of a text."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38


class DefectError(Exception):
    """The function gave something else than it should; the text says what it gave."""


class Watched(list["Pair"]):
    """The pairs of a call, which say at which of them the function is."""

    def __init__(self, pairs: Sequence["Pair"], place: "memoryview[int]") -> None:
        super().__init__(pairs)
        self._place = place

    def _at(self, index: int) -> None:
        self._place[STEPS] += 1
        self._place[PAIR] = index

    def __iter__(self) -> Iterator["Pair"]:
        for index, pair in enumerate(super().__iter__()):
            self._at(index)
            yield pair
        self._at(NOWHERE)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int) and -len(self) <= at < len(self):
            self._at(at % len(self))
        return super().__getitem__(at)

    def __reduce__(self) -> Any:
        """Makes it a plain list in processes that the function starts."""
        return list, (), None, super().__iter__()


class Caller:
    """A scorer's function with all that is needed to call it.

    A coroutine function is called for each pair, or with the attribute `takes_all` for all pairs at once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        place: "memoryview[int]",
        concurrency: int,
        *,
        process: bool = False,
    ) -> None:
        """`concurrency` is the largest number of pairs that a coroutine function has at the same time. With `process`
        it may return a ProcessReward for a pair."""
        self._concurrency = concurrency
        self._process = process
        self._function = function
        self._names = names
        self._place = place
        self._file = getattr(inspect.getmodule(function), "__file__", None)
        # An object may be called as one.
        self.coroutine = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        """True if each pair has a deadline on the event loop of this process."""
        self._runner: Any = None
        if self.coroutine:
            import asyncio

            self._runner = asyncio.Runner()

    def answer(self, pairs: Sequence["Pair"], seconds: Sequence[float]) -> dict[str, Any]:
        """The scores of the pairs, or the error; `seconds` is the time that each may take."""
        each = self._runner is not None and not getattr(self._function, "takes_all", False)
        try:
            if not each:
                given = self._function(Watched(pairs, self._place))
                rows = _of_each(self._runner.run(given) if self._runner else given, len(pairs))
            else:
                rows = self._runner.run(self._each(pairs, seconds))
            return self._told(rows, pairs)
        except DefectError as defect:
            return {"defect": str(defect)[:_MOST_TEXT]}
        except BaseException as error:  # SystemExit too: only the process itself may end
            # With `each` errors are those of pairs, so that this one is of the event loop, which cannot go on.
            return {"raised": self._raised(error), "broken": each}

    async def _each(self, pairs: Sequence["Pair"], seconds: Sequence[float]) -> list[Any]:
        """Calls the coroutine function for each pair, with a deadline of its own, and returns what it gives."""
        import asyncio

        async def one(index: int) -> Any:
            limit = asyncio.timeout(None)
            try:
                async with turn, limit:
                    limit.reschedule(asyncio.get_running_loop().time() + seconds[index])
                    [given] = _of_each(await self._function([pairs[index]]), 1)
                return given
            except DefectError:
                raise
            except BaseException as error:
                late = limit.expired() and isinstance(error, TimeoutError)
                return _Failed({"late": seconds[index]} if late else {"raised": self._raised(error)})
            finally:
                done[index] = True
                while self._place[PAIR] < len(pairs) - 1 and done[self._place[PAIR]]:
                    self._place[PAIR] += 1
                self._place[STEPS] += 1

        turn = asyncio.Semaphore(self._concurrency)
        done = [False] * len(pairs)
        self._place[STEPS] += 1
        self._place[PAIR] = 0
        return list(await asyncio.gather(*map(one, range(len(pairs)))))

    def _told(self, rows: Sequence[Any], pairs: Sequence["Pair"]) -> dict[str, Any]:
        """The frame that holds what the function gave for each pair."""
        from quartet.wire.outcomes import Unscored
        from quartet.wire.pairs import ProcessReward

        scores, unscored = array("d"), list[Any]()
        rows_of, places, rewards = array("q"), array("q"), array("d")
        nothing = [float("nan")] * (len(self._names) or 1)
        for row, given in enumerate(rows):
            if given is None:
                unscored.append([row, {"none": True}])
            elif isinstance(given, _Failed):
                unscored.append([row, given.why])
            elif isinstance(given, Unscored):
                if given.outcome not in range(1, 6):
                    raise DefectError(f"an Unscored of outcome {given.outcome!r} for {_named(pairs[row])}")
                unscored.append([row, {"outcome": int(given.outcome), "reason": str(given.reason)[:_MOST_TEXT]}])
            elif isinstance(given, ProcessReward):
                if not self._process:
                    raise DefectError(f"a ProcessReward, which needs process: true, for {_named(pairs[row])}")
                earned = _earned(given.parts, pairs[row])
                scores.append(sum(earned.values(), start=_number(given.score, pairs[row])))
                rows_of.extend([row] * len(earned))
                places.extend(earned.keys())
                rewards.extend(earned.values())
                continue
            else:
                scores.extend(self._numbers(given, pairs[row]))
                continue
            scores.extend(nothing)
        return {
            "scores": scores.tobytes(),
            "unscored": unscored,
            "part_rows": rows_of.tobytes(),
            "part_places": places.tobytes(),
            "part_rewards": rewards.tobytes(),
        }

    def _numbers(self, given: Any, pair: "Pair") -> list[float]:
        """The scores of a pair in the order of the names."""
        if not self._names:
            return [_number(given, pair)]
        if not isinstance(given, Mapping):
            raise DefectError(f"a {type(given).__name__} for {_named(pair)}")
        if {*given} != {*self._names}:
            raise DefectError(f"{', '.join(sorted(map(str, given))) or 'no name'} for {_named(pair)}")
        return [_number(given[name], pair) for name in self._names]

    def _raised(self, error: BaseException) -> dict[str, Any]:
        """The kind and the place of an error, and its text for the log."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == self._file]
        frame = (own or frames)[-1]
        text = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
        traceback.clear_frames(error.__traceback__)  # with what they hold of memory
        return {
            "name": type(error).__name__[:_MOST_TEXT],
            "line": frame.lineno or 0,
            "file": os.path.basename(frame.filename),
            "late": isinstance(error, TimeoutError),
            "memory": isinstance(error, MemoryError),
            "trace": text,
        }


class _Failed:
    """The reason why a call for one pair failed."""

    def __init__(self, why: dict[str, Any]) -> None:
        self.why = why


def _for_memory(answer: Mapping[str, Any]) -> bool:
    """True if the function raised MemoryError, if only for one of several pairs."""
    whys = [answer, *(why for _, why in answer.get("unscored", ()))]
    return any(why.get("raised", {}).get("memory", False) for why in whys)


def _of_each(given: Any, pairs: int) -> Sequence[Any]:
    """The values for all pairs as a sequence. DefectError unless it holds one for each."""
    given = given.tolist() if hasattr(given, "tolist") else given  # of torch, NumPy, pandas
    asked = "1 pair" if pairs == 1 else f"{pairs} pairs"
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise DefectError(f"a {type(given).__name__} for {asked}")
    if len(given) != pairs:
        raise DefectError(f"{len(given)} scores for {asked}")
    return given


def _named(pair: "Pair") -> str:
    """The pair by its texts, which its caller knows: its place in this call is that of no row of the caller's."""
    return f"prompt {_NAMING.repr(pair.prompt)}, response {_NAMING.repr(pair.response)}"


def _earned(given: Any, pair: "Pair") -> dict[int, float]:
    """The parts of a score, by the number of characters of the response with which each is earned. Those at one place
    are added up, which bounds them by the response."""
    try:
        parts = iter(given)
    except TypeError:
        raise DefectError(f"parts that are a {type(given).__name__} for {_named(pair)}") from None
    earned = dict[int, float]()
    for part in parts:
        try:
            place, reward = part
            place = operator.index(place)
        except (TypeError, ValueError):
            raise DefectError(f"a part that is no number of characters and reward for {_named(pair)}") from None
        if not 0 < place <= len(pair.response):
            raise DefectError(f"a part at {place} of {len(pair.response)} characters for {_named(pair)}")
        earned[place] = earned.get(place, 0.0) + _number(reward, pair)
    return earned


def _number(given: Any, pair: "Pair") -> float:
    if isinstance(given, Sequence | Mapping | set) and not isinstance(given, str | bytes):
        raise DefectError(f"a {type(given).__name__} for {_named(pair)}")
    try:
        if isinstance(given, str | bytes):
            raise TypeError
        return float(given)
    except OverflowError:  # a whole number beyond any float
        return float("inf")
    except (TypeError, ValueError, RuntimeError):
        raise DefectError(f"something that is no number for {_named(pair)}") from None


def _loaded(given: Mapping[str, Any]) -> tuple[Callable[..., Any], str]:
    """The function that the parent names, and the text by which it is identified."""
    path, options = given["function"], given["options"]
    module, _, name = path.partition(":")
    if options is not None:
        made = getattr(importlib.import_module(module), name)(options)
        return made, getattr(made, "source", "")
    if given["checked"]:
        from quartet.config.source import forget_compiled, text_of

        forget_compiled(module)
        function = getattr(importlib.import_module(module), name)
        return function, text_of(function)
    from quartet.config.functions import load_function, source_of

    function = load_function(path, given["field"], asynchronous=True)
    return function, source_of(function, path, given["field"])


def _end_with_parent() -> None:
    """Makes the kernel end this process with its parent, even where it computes without end; one whose parent has
    ended before finds its socket closed. All that it starts stay below it, and then below its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit(memory_bytes: int) -> None:
    """Limits the process's memory, and leaves no image of it on the disk when it ends in a fault."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first to go when the machine has no memory left


def shared(file: int) -> "memoryview[int]":
    """The memory in this file, which holds a number at each of these places. Closes the file."""
    try:
        return memoryview(mmap.mmap(file, PLACE_BYTES)).cast("q")
    finally:
        os.close(file)


def children(process: int) -> set[int]:
    """The processes whose parent is this one; none where the kernel does not say it."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found |= {int(each) for each in file.read().split()}
    return found


def _may_fork(own: set[int]) -> bool:
    """True if this process has one thread, and no open files but `own`: forks would have no threads but one, and
    share the files with what is read of them."""
    opened = {int(name) for name in os.listdir("/proc/self/fd")}  # and the folder's own, which is closed by now
    return len(os.listdir("/proc/self/task")) == 1 and len(opened - own) == 1


def _problem(error: BaseException) -> bytes:
    from services.reward.scorers.frames import packed

    own = type(error).__name__ in ("ConfigError", "RuntimeError")  # which say it in words
    text = str(error) if own else f"{type(error).__name__}: {error}"
    return packed({"problem": text[:_MOST_TEXT]})


def main() -> NoReturn:
    """Forks a worker for each socket that comes, until the parent closes its own."""
    number, path = sys.argv[1:]
    sys.path[:] = json.loads(path)
    _end_with_parent()
    from services.reward.scorers.frames import packed, received, unpacked

    sock = socket.socket(fileno=int(number))
    sock.set_inheritable(False)
    if not (frame := received(sock)):
        os._exit(0)
    first, loaded = unpacked(frame), None
    try:
        _limit(first["memory_bytes"])
        if first["ahead"]:
            loaded = _loaded(first)
    except BaseException as error:
        sock.sendall(_problem(error))
        os._exit(1)
    forks = _may_fork({0, 1, 2, int(number)})
    sock.sendall(packed({"source": loaded[1] if loaded else "", "forks": forks}))
    gc.freeze()  # so that collections in the workers leave alone what they have in common
    places, modules = dict[int, "memoryview[int]"](), children(os.getpid())
    ends, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([sock, ends], [], [])
        if ends in ready:
            ends.recv(4096)
            _reap(places, modules)
        if sock not in ready:
            continue
        message, files, _, _ = socket.recv_fds(sock, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        theirs, place = socket.socket(fileno=files[0]), shared(files[1])
        try:
            pid = os.fork()
        except OSError as error:
            theirs.sendall(_problem(error))
        else:
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                for each in (sock, ends, wakes):
                    each.close()
                os.setsid()
                place[PID] = os.getpid()
                _end_with_parent()
                with contextlib.suppress(OSError):  # of a socket that is closed
                    _work(theirs, place, first, loaded)
                os._exit(1)
            places[pid] = place
        theirs.close()


def _reap(places: dict[int, "memoryview[int]"], modules: set[int]) -> None:
    """Notes how workers ended, and kills what they have started and left, in whatever session; `modules` are the
    children that this process had before."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (place := places.pop(ended[0], None)) is not None:
                place[ENDED] = ended[1] + 1
    for left in children(os.getpid()) - places.keys() - modules:
        os.kill(left, signal.SIGKILL)


def _work(
    sock: socket.socket,
    place: "memoryview[int]",
    first: Mapping[str, Any],
    loaded: tuple[Callable[..., Any], str] | None,
) -> NoReturn:
    """Serves the parent until it closes the socket."""
    from services.reward.scorers.frames import packed, pairs_of, received, unpacked

    try:
        function, source = loaded or _loaded(first)
        caller = Caller(function, first["names"], place, first["concurrency"], process=first["process"])
    except BaseException as error:
        sock.sendall(_problem(error))
        os._exit(1)
    sock.sendall(packed({"source": source, "coroutine": caller.coroutine}))
    while frame := received(sock):
        asked = unpacked(frame)
        place[STEPS] = 1  # the function is called, and is to blame for whatever ends the process now
        answer = caller.answer(pairs_of(asked["pairs"]), asked["seconds"])
        if os.getpid() != place[PID]:  # a fork of the function's own, which was not asked
            os._exit(0)
        ends = answer.pop("broken", False) or _for_memory(answer)
        sock.sendall(packed(answer | {"call": asked["call"], "ends": ends}))
        if ends:
            os._exit(0)  # with which alone what a leak holds is given back
        del frame, asked, answer
    os._exit(0)


if __name__ == "__main__":
    main()
