"""Ends an engine's processes when the replica's process has ended, in whatever way."""

import functools
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection


@functools.cache
def end_with_parent() -> None:
    """Ends this process by SIGKILL once the process that started it has ended; does nothing in a main process.

    vLLM tells its processes to end when a replica shuts down. A replica that is killed tells them nothing, and they
    would keep the model's memory, and on a GPU the device's, so that the replica's successor could not start.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent.sentinel,), name="end-with-parent", daemon=True).start()


def _wait(sentinel: int) -> None:
    connection.wait([sentinel])
    # Not an exit: nothing is left to hand over, and vLLM's own clean-up waits for its parent's answers.
    os.kill(os.getpid(), signal.SIGKILL)
