"""The connections of a guarded port, of which those that have proved nothing give way to newer ones."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from quartet.security.policy import Limits

LOOK_S = 0.1
"""Seconds between two looks at the open connections while there are many."""
REST_S = 0.5
"""Seconds between two looks while there are few. A look takes 0.2 to 0.7 ms of the event loop then."""
PROOF_S = 1.0
"""Seconds that a caller may take to prove its identity while strangers open connections as fast as they can."""
_FILES = "/proc/self/fd"
_guarded: set[int] = set()
"""The ports of this process whose connections are watched, each by an instance of its own."""
_Socket = tuple[int, int]
"""Descriptor and inode. A descriptor alone may belong to another file by the next look."""


class _Seen(NamedTuple):
    port: int
    peer: str
    since: float


class Connections:
    """Closes connections without an admitted call: the oldest when there are too many, and any that is too old.

    Each connection takes one of the process's files, and every program that reaches the port can open one. gRPC's own
    limit refuses the newest, which means all callers once strangers have filled it. A caller with an identity proves
    it within milliseconds, so the oldest connections that have proved none are not its own. gRPC has no hook where it
    accepts a connection; this class finds the sockets among the process's files and shuts them down, which gRPC takes
    for the other end's leaving.
    """

    def __init__(
        self, limits: Callable[[], Limits], most_files: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            limits: returns the current limits, of which this class uses `strangers` and `handshake_s`.
            most_files: the process's limit of open files. Connections without an admitted call may take an eighth of
                it, and until they are PROOF_S old a half; connections to each other port may take an eighth.
            clock: returns seconds.
        """
        self._limits, self._most_files, self._clock = limits, most_files, clock
        self._port = 0
        self._crowded = False
        self._proved: set[str] = set()
        self._seen: dict[_Socket, _Seen] = {}

    def prove(self, peer: str) -> None:
        """Keeps the connection of an admitted call, given the peer's address as gRPC gives it."""
        self._proved.add(peer)

    def close(self, peer: str) -> None:
        """Closes the connection of a caller that does not read what it asked for. What it has not read is lost."""
        self._proved.discard(peer)
        for key in _sockets():
            if _ends(key[0]) == (self._port, peer):
                _close(key)

    def watch(self, port: int) -> None:
        """Looks at the connections to `port` again and again for as long as the current event loop runs."""
        self._port = port
        _guarded.add(port)
        loop = asyncio.get_running_loop()

        def again() -> None:
            try:
                self.look()
            finally:
                loop.call_later(LOOK_S if self._crowded else REST_S, again)

        loop.call_later(REST_S, again)

    def look(self) -> int:
        """Closes the connections that are too many or too old; returns how many."""
        now, found = self._clock(), _sockets()
        # Those seen before stay in the order in which they came; of those that are new it is not known.
        self._seen = {key: seen for key, seen in self._seen.items() if key in found}
        for key in sorted(found - self._seen.keys()):
            self._seen[key] = _Seen(*_ends(key[0]), now)
        ours = {key: seen for key, seen in self._seen.items() if seen.port == self._port}
        self._proved &= {seen.peer for seen in ours.values()}
        strangers = [(key, now - seen.since) for key, seen in ours.items() if seen.peer not in self._proved]
        excess = [*self._excess(strangers), *self._excess_of_other_ports()]
        for key in excess:
            _close(key)
        return len(excess)

    def _excess(self, strangers: Sequence[tuple[_Socket, float]]) -> Iterator[_Socket]:
        """Connections to close, the oldest first, of those without an admitted call, which come with their ages."""
        limits = self._limits()
        most, most_young = min(limits.strangers, self._most_files // 8), self._most_files // 2
        self._crowded = 2 * len(strangers) > most
        for place, (key, age) in enumerate(strangers):
            left = len(strangers) - place
            crowded = left > most_young or (left > most and age >= PROOF_S)
            if not (age >= limits.handshake_s or (crowded and age > 0)):
                return
            yield key

    def _excess_of_other_ports(self) -> Iterator[_Socket]:
        """Connections to close of those to other ports of this process, which are Ray's: the newest, as Ray's own
        come at the start, stay, and are few."""
        by_port: dict[int, list[_Socket]] = {}
        for key, seen in self._seen.items():
            if seen.port not in {0, self._port, *_guarded}:
                by_port.setdefault(seen.port, []).append(key)
        most = self._most_files // 8
        for keys in by_port.values():
            self._crowded = self._crowded or 2 * len(keys) > most
            yield from keys[most:]


def _sockets() -> set[_Socket]:
    """Each socket of this process."""
    found = set()
    for name in os.listdir(_FILES):
        with suppress(OSError):  # closed since
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _borrowed(descriptor: int) -> socket.socket:
    """A socket object of its own for a descriptor that may be closed and given to another file at any moment. OSError
    if it is closed, or no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _ends(descriptor: int) -> tuple[int, str]:
    """The port of a connection's own end, and its other end in gRPC's spelling; (0, "") for any other socket."""
    with suppress(OSError), _borrowed(descriptor) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return int(found.getsockname()[1]), spelled(*found.getpeername())
    return 0, ""


def spelled(host: str, port: int, _flow: int = 0, scope: int = 0) -> str:
    """The address of a socket's other end, as Python gives it, in gRPC's spelling."""
    host = host.partition("%")[0].removeprefix("::ffff:")
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    return f"ipv6:%5B{host}{f'%25{scope}' if scope else ''}%5D:{port}"


def _close(key: _Socket) -> None:
    descriptor, inode = key
    with suppress(OSError), _borrowed(descriptor) as found:
        if os.fstat(found.fileno()).st_ino == inode:
            found.shutdown(socket.SHUT_RDWR)
