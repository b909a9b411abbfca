"""The only rank of a learner, in a thread of this process: no other process has to start, and none can be lost."""

import asyncio
import atexit
import ctypes
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

from quartet.ranks.group import RankDied
from quartet.ranks.rank import Rank

GRACE_S = 2.0
"""Most seconds that the end of the program waits for a call to be interrupted."""


class DaemonThread(Executor):
    """One thread that calls take turns in. The end of the program does not wait for a call to finish, as it would
    with a ThreadPoolExecutor."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._calls: set[Future[Any]] = set()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    @property
    def busy(self) -> bool:
        """True while a call runs or waits."""
        return bool(self._calls)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Calls the function after those that were submitted before; RuntimeError after `shutdown`."""
        if self._ended:
            raise RuntimeError("the thread was shut down")
        future: Future[Any] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._waiting.put((future, functools.partial(function, *arguments, **options)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Ends the thread after the calls that wait, or with `cancel_futures` after the one that runs. Does not wait
        for it."""
        self._ended = True
        while cancel_futures and not self._waiting.empty():
            if (call := self._waiting.get()) is not None:
                call[0].cancel()
        self._waiting.put(None)

    def interrupt(self) -> None:
        """Raises SystemExit in the call that runs, when it is in Python again; a call into a library goes on until
        then."""
        if self.busy and (thread := self._thread.ident) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))

    def _leave(self) -> None:
        """Ends the thread before the interpreter ends: a call of torch that returned then would abort the process."""
        self.shutdown(cancel_futures=True)
        self.interrupt()
        self._thread.join(GRACE_S)

    def _work(self) -> None:
        try:
            self._take_turns()
        finally:
            atexit.unregister(self._leave)

    def _take_turns(self) -> None:
        while (call := self._waiting.get()) is not None:
            future, function = call
            del call
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:  # such as SystemExit, for which the caller would wait in vain
                    failed = error if isinstance(error, Exception) else RuntimeError(repr(error))
                    future.set_exception(failed)
                    del failed
                else:
                    future.set_result(result)
                    del result
            # Otherwise the arguments, the model and the result would live until the next call.
            del future, function


class ThreadRank:
    """A RankProcess without the process. One thread: calls take turns, each sees one set of weights.

    A call that does not return to Python cannot be ended, and keeps its model.
    """

    death = ""
    stopped = False

    def __init__(self, timeout_s: float) -> None:
        self.rank: Rank | None = Rank(0, 1, timeout_s)
        self._thread = DaemonThread("rank")
        self._beside: list[DaemonThread] = []

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Calls the rank's method in its thread; `run_beside` in another one."""
        if self.rank is None:
            raise RankDied("its thread was shut down")
        called = functools.partial(getattr(self.rank, method), *arguments, **options)
        loop = asyncio.get_running_loop()
        if method != "run_beside":
            return loop.run_in_executor(self._thread, called)
        beside = DaemonThread("rank, beside")
        answer = loop.run_in_executor(beside, called)
        beside.shutdown()
        self._beside = [each for each in (*self._beside, beside) if each.busy]
        return answer

    def kill(self) -> bool:
        """See RankProcess. False if a call runs, which is interrupted as soon as it can be. Those that wait do not
        begin. The model's memory is given back, at the end of that call."""
        self._thread.shutdown(cancel_futures=True)
        self.rank = None
        running = [each for each in (self._thread, *self._beside) if each.busy]
        for each in running:
            each.interrupt()
        return not running
