"""Threads beside the event loop: their turns, their errors, and the end of the program."""

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest

from quartet.threads import DaemonThread

HANGING = """
import threading
from quartet.threads import DaemonThread

for number in range(64):
    thread = DaemonThread(f"hangs {number}")
    thread.submit(threading.Event().wait)
    thread.shutdown()
print("begun", flush=True)
"""


def call(thread: DaemonThread, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().run_in_executor(thread, function, *arguments)


def test_a_call_that_a_waiting_thread_was_given_just_now_is_cancelled() -> None:
    """A thread has the call and has not run since, if it is ended right after it was called."""
    thread, interval = DaemonThread("ours"), sys.getswitchinterval()
    thread.submit(int).result(60)
    time.sleep(0.1)  # it waits for the next one
    sys.setswitchinterval(10)
    try:
        given = thread.submit(int)
        thread.shutdown(cancel_futures=True)
        assert given.cancelled()
        assert not thread.busy
    finally:
        sys.setswitchinterval(interval)


def test_a_call_that_has_not_begun_is_not_interrupted() -> None:
    """The thread has the call and has not run since."""
    thread, interval = DaemonThread("ours"), sys.getswitchinterval()
    thread.submit(int).result(60)
    time.sleep(0.1)  # it waits for the next one
    sys.setswitchinterval(10)
    try:
        given = thread.submit(int, "7")
        thread.interrupt()
    finally:
        sys.setswitchinterval(interval)
    assert given.result(10) == 7
    assert thread.submit(int, "8").result(10) == 8


def test_a_call_that_is_about_to_begin_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No one can cancel the call any more."""
    thread, runs = DaemonThread("ours"), futures.Future.set_running_or_notify_cancel

    def interrupted(future: futures.Future[Any]) -> bool:
        answer = runs(future)
        thread.interrupt()
        return answer

    monkeypatch.setattr(futures.Future, "set_running_or_notify_cancel", interrupted)
    with pytest.raises(RuntimeError, match="SystemExit"):
        thread.submit(int, "7").result(10)
    monkeypatch.undo()
    assert thread.submit(int, "8").result(10) == 8


def test_whenever_it_is_interrupted_every_call_ends() -> None:
    thread, interval = DaemonThread("ours"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    ended = []
    try:
        for _ in range(2000):
            given = thread.submit(sum, range(20))
            for _ in range(3):
                thread.interrupt()
            ended.append(given.exception(10))
    finally:
        sys.setswitchinterval(interval)
    assert {repr(error) for error in ended} <= {"None", "RuntimeError('SystemExit()')"}
    assert thread.submit(int, "7").result(10) == 7


def test_a_call_that_runs_is_interrupted_once() -> None:
    thread, begun, left = DaemonThread("ours"), threading.Event(), threading.Event()

    def works() -> str:
        try:
            begun.set()
            while True:
                time.sleep(0.001)
        except SystemExit:
            left.wait(10)
            return "left"

    given = thread.submit(works)
    begun.wait(10)
    thread.interrupt()
    thread.interrupt()
    left.set()
    assert given.result(10) == "left"


async def test_calls_take_turns_in_one_thread() -> None:
    thread, gate = DaemonThread("ours"), threading.Event()
    first, second = call(thread, gate.wait), call(thread, threading.get_ident)
    assert not second.done()
    gate.set()
    assert await first
    assert await second == await call(thread, threading.get_ident) != threading.get_ident()
    assert not thread.busy
    thread.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        thread.submit(print)


@pytest.mark.parametrize(
    "death",
    [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(7), futures.CancelledError()],
    ids=repr,
)
async def test_what_would_end_a_thread_or_an_event_loop_is_an_error_of_the_call(death: BaseException) -> None:
    def dies() -> None:
        raise death

    thread = DaemonThread("ours")
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError) as caught:
            await call(thread, dies)
        assert str(caught.value) == repr(death)
        assert await call(thread, int, "7") == 7
    thread.shutdown()


def test_one_to_which_nothing_refers_ends_its_thread_after_its_calls() -> None:
    executor = DaemonThread("ours")
    thread, gate, watched = executor._thread, threading.Event(), weakref.ref(executor)
    done = executor.submit(gate.wait)
    del executor
    assert watched() is not None  # the end of the program has to know of it
    gate.set()
    assert done.result(10)
    del done
    thread.join(10)
    assert not thread.is_alive()
    assert watched() is None


def test_the_end_of_a_program_waits_a_moment_for_all_threads_together() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("begun\n", "")
