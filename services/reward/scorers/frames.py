"""Messages between a replica and its worker processes: plain values by msgpack, each after its length.

Nothing is unpickled, so that what a function writes can at worst be refused.
"""

import dataclasses
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from quartet.wire.pairs import Pair

LENGTH = struct.Struct("!I")
MOST_ANSWER = 64 << 20
"""Most bytes of a message of a worker, which a function may have written."""
_FIELDS = tuple(field.name for field in dataclasses.fields(Pair))
_JSON = ("messages", "columns")
"""Fields that hold values of JSON, such as whole numbers of any size, for which msgpack has no place."""


def packed(value: Any) -> bytes:
    """The message that holds the value."""
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> Any:
    """The value of a message, without its length. ValueError if it holds none."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)


def rows_of(pairs: Sequence[Pair]) -> list[list[Any]]:
    """The pairs as values that a message may hold."""
    return [
        [json.dumps(getattr(pair, name)) if name in _JSON else getattr(pair, name) for name in _FIELDS]
        for pair in pairs
    ]


def pairs_of(rows: Sequence[list[Any]]) -> list[Pair]:
    """The pairs of which `rows_of` made these values."""
    found = []
    for row in rows:
        known = dict(zip(_FIELDS, row, strict=True))
        known |= {name: json.loads(known[name]) for name in _JSON}
        found.append(Pair(**known | {name: tuple(known[name]) for name in ("texts", "messages")}))
    return found


def received(sock: socket.socket) -> bytes:
    """The next message without its length; empty if the other end closed the socket."""
    head = _exactly(sock, LENGTH.size)
    return _exactly(sock, LENGTH.unpack(head)[0]) if head else b""


def _exactly(sock: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        part = sock.recv(min(size - len(got), 1 << 20))
        if not part:
            return b""
        got += part
    return bytes(got)
