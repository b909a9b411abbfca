"""Work on files from elsewhere, in a process of its own that may be ended: with a limit of memory and a deadline."""

import gc
import json
import os
import resource
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from quartet.config.base import GIB, ConfigError

_LENGTH = struct.Struct("!Q")
_READ = 1 << 20


def bounded(work: Callable[[], Iterable[Any]], where: str, *, memory: int, seconds: float) -> Iterator[Any]:
    """The values that `work` yields, each made of JSON's types, from a fork of this process.

    A fork needs milliseconds, and sees all that this process has loaded. `work` must not use threads that others
    started, nor locks that others may hold.

    Args:
        work: called in the fork.
        where: field and file, with which errors begin.
        memory: bytes that the fork may take beyond those that this process has.
        seconds: time after which it is ended.

    Raises:
        ConfigError: `work` raised an error, which is one line then, or went beyond a limit.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
        child = os.fork()
    if child == 0:
        _carry_out(work, writer, memory, seconds)
    os.close(writer)
    try:
        yield from _received(reader, where, memory, seconds)
    finally:
        os.close(reader)
        # Not waited for before: a child that has not been told to end may still be busy.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _received(reader: int, where: str, memory: int, seconds: float) -> Iterator[Any]:
    """The values that arrive until the last one. ConfigError instead of an error that arrives, or if none does."""
    end, data = time.monotonic() + seconds, bytearray()
    waiting = select.poll()  # select takes no descriptor from 1024 on
    waiting.register(reader, select.POLLIN)
    while True:
        while len(data) >= _LENGTH.size and len(data) - _LENGTH.size >= (size := _LENGTH.unpack_from(data)[0]):
            kind, value = json.loads(data[_LENGTH.size : _LENGTH.size + size])
            del data[: _LENGTH.size + size]
            if kind == "end":
                return
            if kind == "memory":
                raise ConfigError(f"{where}: needs more than {memory / GIB:.3g} GiB of memory to be read")
            if kind == "error":
                raise ConfigError(f"{where}: {value}")
            yield value
        if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            raise ConfigError(f"{where}: was not read within {seconds:.3g} s")
        piece = os.read(reader, _READ)
        if not piece:
            raise ConfigError(
                f"{where}: the process that read it was ended by the system; it may need too much memory"
            )
        data += piece


def _carry_out(work: Callable[[], Iterable[Any]], writer: int, memory: int, seconds: float) -> None:
    """The fork's part; never returns."""
    code = 1
    # What this process leaves to be collected is not the fork's to finalize: threads that are not here may own it.
    gc.freeze()
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for limit, most in ((resource.RLIMIT_AS, _address_space() + memory), (resource.RLIMIT_CPU, int(seconds) + 1)):
            allowed = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if allowed == resource.RLIM_INFINITY else min(most, allowed), allowed))
        try:
            for value in work():
                _send(writer, "value", value)
            _send(writer, "end", None)
        except MemoryError:
            _send(writer, "memory", None)
        except Exception as error:
            text = str(error).splitlines() or [""]
            said = text[0] if isinstance(error, ConfigError) else f"{type(error).__name__}: {text[0]}"
            _send(writer, "error", said[:1000])
        code = 0
    finally:
        os._exit(code)


def _address_space() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _send(writer: int, kind: str, value: Any) -> None:
    message = json.dumps([kind, value]).encode()
    data = memoryview(_LENGTH.pack(len(message)) + message)
    while data:
        data = data[os.write(writer, data) :]
