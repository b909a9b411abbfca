"""Passes that leave the cores to sampling first, on a machine whose models share them."""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from quartet.models.device import share_cores

LOWEST = 19
"""The lowest priority of a thread on the CPU."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def step_back() -> None:
    """Gives this thread, and those that it will start, the lowest priority on the CPU, for good."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def in_background(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Decorates a function that computes: on a machine without GPUs it runs in a thread of the lowest priority.

    More waits for sampling than for such a pass. Its caller waits for it, and calls take turns.
    """

    @functools.wraps(function)
    def stepped_back(*arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        if not share_cores():
            return function(*arguments, **options)
        return _thread().submit(function, *arguments, **options).result()

    return stepped_back


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """The thread of this process for all such functions."""
    return ThreadPoolExecutor(1, "background", initializer=step_back)
