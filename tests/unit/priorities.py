"""The priorities on the CPU with which modules compute."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def priorities() -> Iterator[set[int]]:
    """Collects the niceness of each thread in which a module's forward pass begins within the context."""
    seen: set[int] = set()

    def note(*_: Any) -> None:
        seen.add(own_priority())

    hook = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def own_priority() -> int:
    """The niceness of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
