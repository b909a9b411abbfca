"""The only rank of a learner, in a process of its own on this machine.

DeepSpeed's hooks keep a trained model in memory until its process ends, with ZeRO 3 even after `destroy`. A
restoration builds new ranks, so that a single process would hold two models with their optimizers.
"""

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil

from quartet.models.device import VISIBLE, default_device
from quartet.ranks.group import RankDied
from quartet.ranks.ranks import Rank
from quartet.ranks.stopped import is_stopped

EOF_S = 5.0
"""Seconds that a process may take to end after its pipe broke."""

Call = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]


class ProcessRank:
    """A RankProcess. It ends with the process that made it."""

    def __init__(self, timeout_s: float) -> None:
        """Starts the process, with this process's environment and GPUs."""
        self._pipe, end = Pipe()
        # -P: modules are looked for where this process looks for them, not in the current folder first.
        command = [sys.executable, "-P", "-m", __name__, str(end.fileno()), str(timeout_s)]
        self._process = subprocess.Popen(command, pass_fds=[end.fileno()], env=_environment())
        end.close()
        self._seen = psutil.Process(self._process.pid)
        # Batches are large, so one thread beside the event loop sends them, in order.
        self._line = ThreadPoolExecutor(1, "to the rank")
        self._calls: dict[int, Call] = {}
        self._count = 0
        self._death = ""
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True, name="from the rank").start()

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Sends the call to the process, as RankProcess describes."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if self._death:
                answer.set_exception(RankDied(self._death))
                return answer
            self._count += 1
            self._calls[self._count] = loop, answer
            self._line.submit(self._send, self._count, method, arguments, options)
        return answer

    @property
    def death(self) -> str:
        """The way in which the process ended; empty while it lives."""
        return self._death

    @property
    def stopped(self) -> bool:
        """True while a signal has stopped the process."""
        return is_stopped(self._seen)

    def _send(self, number: int, *call: Any) -> None:
        try:
            self._pipe.send((number, *call))
        except OSError:
            pass  # `_listen` notices too, and knows the reason
        except Exception as error:
            self._settle(number, failed=True, answer=TypeError(f"the call cannot be sent: {error}"))

    def _listen(self) -> None:
        while True:
            try:
                number, failed, answer = self._pipe.recv()
            except (EOFError, OSError):
                break
            self._settle(number, failed=failed, answer=answer)
        try:
            death = f"its process ended with exit code {self._process.wait(EOF_S)}"
        except subprocess.TimeoutExpired:
            death = "its pipe broke"
        with self._lock:
            self._death, left = death, list(self._calls)
        for number in left:
            self._settle(number, failed=True, answer=RankDied(death))

    def _settle(self, number: int, *, failed: bool, answer: Any) -> None:
        with self._lock:
            loop, call = self._calls.pop(number)

        def settle() -> None:
            if not call.done():
                call.set_exception(answer) if failed else call.set_result(answer)

        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    def kill(self) -> None:
        """Ends the process at once; the system gets back all of its memory."""
        self._process.kill()
        self._line.shutdown(wait=False, cancel_futures=True)


def _environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if default_device().type == "cpu":
        # Hide the GPUs that are not this process's own: the new process does not know what Ray assigned.
        environment[VISIBLE] = ""
    return environment


def serve(pipe: Connection, rank: Rank) -> None:
    """Answers calls in turn, except `run_beside`, until the other end closes the pipe; then ends the process."""
    turn, beside, sending = ThreadPoolExecutor(1, "rank"), ThreadPoolExecutor(2, "beside"), threading.Lock()

    def answer(number: int, method: str, arguments: Any, options: Any) -> None:
        failed, answered = False, None
        try:
            answered = getattr(rank, method)(*arguments, **options)
        except Exception as error:
            failed, answered = True, _sendable(error)
        with sending:
            try:
                pipe.send((number, failed, answered))
            except Exception as error:
                pipe.send((number, True, TypeError(f"the answer cannot be sent: {error}")))

    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            # The result of a computation in progress has no reader any more.
            os._exit(0)
        (beside if call[1] == "run_beside" else turn).submit(answer, *call)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))  # safe: the bytes were made in this line
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Rank(0, 1, float(sys.argv[2])))
