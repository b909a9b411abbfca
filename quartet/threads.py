"""Threads beside the event loop that the end of the program does not wait for, and that end."""

import asyncio
import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

GRACE_S = 2.0
"""Most seconds that the end of the program waits for calls to be interrupted, all together."""
_Waiting = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThread(Executor):
    """One thread that calls take turns in. The end of the program does not wait for a call to finish, as it would
    with a ThreadPoolExecutor: it interrupts the call, and waits for that a moment."""

    def __init__(self, name: str) -> None:
        self._waiting: _Waiting = SimpleQueue()
        self._calls: set[Future[Any]] = set()
        self._ended = False
        self._turn = _Turn()
        # It does not know the executor, so that one to which nothing refers ends its thread.
        self._thread = threading.Thread(target=_work, args=(self._waiting, self._turn), name=name, daemon=True)
        self._thread.start()
        _living.add(self)
        atexit.unregister(_leave)
        atexit.register(_leave)  # again, so that it comes before what ends the libraries that are loaded by now

    def __del__(self) -> None:
        self._waiting.put(None)

    @property
    def busy(self) -> bool:
        """True while a call runs or waits."""
        return bool(self._calls)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Calls the function after those that were submitted before; RuntimeError after `shutdown`. Errors that would
        end a thread or an event loop, such as SystemExit, and those that mean something else in a future of asyncio,
        StopIteration and CancelledError, become a RuntimeError."""
        if self._ended:
            raise RuntimeError("the thread was shut down")
        future: Future[Any] = Future()
        self._calls.add(future)
        future.add_done_callback(self._forget)
        self._waiting.put((future, functools.partial(function, *arguments, **options)))
        return future

    def _forget(self, future: Future[Any]) -> None:
        self._calls.discard(future)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Ends the thread after the calls that wait, or with `cancel_futures` after the one that runs. Does not wait
        for it."""
        self._ended = True
        if cancel_futures:
            # One of them may be out of the queue already, and not have begun: the queue gives a call to a thread that
            # waits at once, from Python 3.13 on.
            for future in tuple(self._calls):
                future.cancel()
            with contextlib.suppress(Empty):
                while True:
                    self._waiting.get_nowait()
        self._waiting.put(None)

    def interrupt(self) -> None:
        """Raises SystemExit in the call that runs, once, when it is in Python again; a call into a library goes on
        until then."""
        self._turn.interrupt(self._thread.ident)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread, for `timeout_s` at most."""
        self._thread.join(timeout_s)


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """The result of `work`, or its error, from a thread of its own, so that the event loop goes on renewing leases
    and reading responses. A caller that gives up leaves the thread to itself. Others than an Exception, such as
    SystemExit, arrive as a RuntimeError."""
    # Not in a pool: the end of the program would wait for work that hangs.
    thread = DaemonThread(name)
    result = asyncio.get_running_loop().run_in_executor(thread, work)
    thread.shutdown()
    return await result


class _Turn:
    """The call that a thread makes, and that another thread may interrupt. What the thread does between two calls is
    not interrupted: the thread would end, or a call have no result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = self._open = self._asked = False

    def take(self) -> None:
        """A call is taken, which an interruption meets as it begins."""
        with self._lock:
            self._taken, self._asked = True, False

    def begin(self) -> None:
        """The call begins. SystemExit if it was interrupted since it was taken."""
        with self._lock:
            if self._asked:
                raise SystemExit
            self._open = True

    def end(self) -> None:
        """The call has ended; an interruption that is on its way comes no more, or in here."""
        with self._lock:
            self._taken = self._open = False
        _raise_in(threading.get_ident(), None)

    def interrupt(self, thread: int | None) -> None:
        """Raises SystemExit in the call, if there is one and it was not interrupted before."""
        with self._lock:
            if self._open and thread is not None:
                self._open = False
                _raise_in(thread, SystemExit)
            self._asked = self._taken


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Has the thread raise an error when it is in Python again, in place of one that it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


def _work(waiting: _Waiting, turn: _Turn) -> None:
    while (call := waiting.get()) is not None:
        future, function = call
        del call
        turn.take()
        if not future.set_running_or_notify_cancel():
            turn.end()
        else:
            try:
                turn.begin()
                result = function()
                turn.end()
            except BaseException as error:
                turn.end()  # not interrupted again, so that it is made to its end here
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError)
                future.set_exception(error if plain else RuntimeError(repr(error)))
            else:
                future.set_result(result)
                del result
        # Otherwise the arguments, the model and the result would live until the next call.
        del future, function


_living: weakref.WeakSet[DaemonThread] = weakref.WeakSet()
"""The executors that are in use: a call that runs keeps its own."""


def _leave() -> None:
    """Ends all threads before the interpreter ends: a call of torch that returned then would abort the process."""
    living = list(_living)
    for thread in living:
        thread.shutdown(cancel_futures=True)
        thread.interrupt()
    end = time.monotonic() + GRACE_S
    for thread in living:
        thread.join(max(end - time.monotonic(), 0.0))


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Context of all that a process does. If it ends well, or by sys.exit with a status, the process ends before
    Python takes its modules apart: triton, which torch loads, would then print a page on objects that it leaks. What
    is registered for the end meanwhile is carried out before."""
    status: int | None = None

    def end() -> None:
        if status is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    atexit.register(end)
    try:
        yield
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else None
        raise
