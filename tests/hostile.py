"""Function scorers whose pairs do what no function should, as their labels say; a pair without a label scores 1."""

import asyncio
import contextlib
import decimal
import fcntl
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quartet.wire.pairs import Pair


class Half(float):
    """A number that is another one when it is asked."""

    def __float__(self) -> float:
        return 0.5


class Wordless(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def hostile(pairs: Sequence[Pair]) -> list[Any]:
    """Gives for each pair what `_given` does."""
    return [_given(pair.label) for pair in pairs]


def _sockets() -> list[int]:
    """The numbers of this process's open sockets."""
    found = []
    for number in range(3, 100):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                found.append(number)
    return found


ARMED: list[Callable[[], object]] = []
"""Acts that an earlier pair has left for the next one."""


def _given(label: str) -> Any:
    while ARMED:
        ARMED.pop()()
    match label:
        case "prints":
            print("{" * 100_000)
            sys.stdout.buffer.write(b"\xff\x00" * 1000)
        case "forks":
            os.fork()
        case "forks and ends":
            if not os.fork():
                time.sleep(60)
            os._exit(3)
        case "ends its parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        case "stops its parent":
            os.kill(os.getppid(), signal.SIGSTOP)
            os._exit(3)
        case "ends its group":
            os.killpg(0, signal.SIGTERM)
        case "ends later":
            ARMED.append(lambda: os._exit(5))
        case "writes later":
            ARMED.append(lambda: [os.write(number, b"\x00\x00\x00\x05hello") for number in _sockets()])
        case "claims much":
            for number in _sockets():
                os.write(number, b"\xff\xff\xff\xff")
            time.sleep(60)
        case "turns its socket":
            for number in _sockets():
                os.dup2(os.open("/dev/null", os.O_RDWR), number)
        case "blocks its socket":
            for number in _sockets():
                fcntl.fcntl(number, fcntl.F_SETFL, os.O_NONBLOCK)
        case "shuts its socket":
            for number in _sockets():
                socket.socket(fileno=number).shutdown(socket.SHUT_RDWR)
        case "limits itself":
            resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, 1 << 20))
        case "breaks json":
            import json

            json.loads = None  # type: ignore[assignment]
        case "breaks its list":
            list.__init__ = None  # type: ignore[method-assign, assignment]
        case "says much":
            raise ValueError("\ud800 much " * (10 << 20))
        case "says nothing":
            raise Wordless
        case "has a long name":
            raise type("\ud800" * (1 << 20), (Exception,), {})
        case "raises itself":
            error = ValueError("round")
            error.__cause__ = error
            raise error
        case "goes round":
            _given(label)
        case "half":
            return Half(1.0)
        case "true":
            return np.True_
        case "numpy":
            return np.float16(0.25)
        case "array":
            return np.asarray(0.25)
        case "decimal":
            return decimal.Decimal("0.25")
        case "large":
            return 10**400
        case "not a number":
            return np.float32("nan")
        case "a number in words":
            return "1.0"
        case "numbers":
            return [1.0] * (10 << 20)
        case "complex":
            return 1 + 1j
    return 1.0


async def hostile_async(pairs: Sequence[Pair]) -> list[Any]:
    """The same for one pair, with what a coroutine alone can do."""
    [pair] = pairs
    loop = asyncio.get_running_loop()
    match pair.label:
        case "spins":
            while True:
                pass
        case "is not cancelled":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        case "cancels all":
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(60)
        case "stops its loop":
            loop.stop()
            await asyncio.sleep(60)
        case "closes its loop":
            loop.stop()
            loop.call_soon(loop.close)
            await asyncio.sleep(60)
        case "leaves":
            sys.exit(4)
        case "interrupts":
            raise KeyboardInterrupt
        case "blocks later":
            loop.call_later(0.05, time.sleep, 60)
        case label:
            return [_given(label)]
    return [1.0]
