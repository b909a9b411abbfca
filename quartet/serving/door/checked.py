"""A request that was checked at the door and travels on as the bytes that arrived."""

import re
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor

from quartet.wire.errors import ResourceExhausted

_NUMBER, _SIZED, _BYTES = 0, 2, {1: 8, 5: 4}
"""Wire types, the last three bits of a field's tag: of variable length, with its length in front, of fixed length."""
_ANY_NUMBER = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")


class Checked:
    """A request on its way through Serve's proxy, which does nothing with it but pickle it for the replica, once.

    It unpickles as the message that its bytes are. Pickling the message itself would write it out again, which keeps
    the event loop several times as long as copying the bytes. The proxy keeps the object until the replica answers,
    so the bytes are given up when they are pickled.
    """

    def __init__(self, kind: type, raw: bytes) -> None:
        """
        Args:
            kind: the message's generated class.
            raw: a message of that class.
        """
        self._kind = kind
        self._raw: bytes | None = raw

    def __reduce__(self) -> tuple[Any, ...]:
        """The bytes, and how they are read."""
        if self._raw is None:
            raise RuntimeError("a request is pickled only once")
        raw, self._raw = self._raw, None
        return _message, (self._kind, raw)


def _message(kind: Any, raw: bytes) -> Any:
    return kind.FromString(raw)


def parsed(kind: Any, raw: bytes, method: str, most: int) -> Any:
    """The message of class `kind` that the bytes are, unless it has more than `most` elements.

    Parsing numbers that are packed as bytes copies them. Parsing millions of small fields instead takes the event
    loop and the memory many times as long as their size suggests, so they are counted first.

    Raises:
        ResourceExhausted: too many elements.
        ValueError: the bytes are not such a message. Protobuf's own DecodeError may come instead.
    """
    # A field has at least two bytes. As many elements of a list of numbers may have one, which does not matter.
    if len(raw) > 2 * most and elements(raw, kind.DESCRIPTOR, most) > most:
        raise ResourceExhausted(f"{method}: a request of more than {most} fields and elements of lists; split it")
    return kind.FromString(raw)


def elements(raw: bytes, kind: Descriptor, most: int) -> int:
    """Fields of the message and of those inside it, and elements of their lists; stops soon after `most`."""
    count, messages = 0, [(0, len(raw), kind)]
    while messages and count <= most:
        at, end, kind = messages.pop()
        inside = _inside(kind)
        while at < end and count <= most:
            tag, at = _number(raw, at)
            count += 1
            field, wire = tag >> 3, tag & 7
            if wire == _NUMBER:
                at = _after_number(raw, at)
            elif wire == _SIZED:
                size, at = _number(raw, at)
                if field in inside:
                    message = inside[field]
                    if message is None:
                        count += size  # at most: a number of the list may have several bytes
                    else:
                        messages.append((at, at + size, message))
                at += size
            elif wire in _BYTES:
                at += _BYTES[wire]
            else:
                raise ValueError("a field of no known wire type")
        if at > end:
            raise ValueError("a field that is longer than its message")
    return count


@cache
def _inside(kind: Descriptor) -> dict[int, Descriptor | None]:
    """Field number -> type of the message in it, or None for a list of numbers; texts and bytes are left out."""
    return {field.number: field.message_type for field in kind.fields if field.message_type or field.is_packed}


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """Reads a protobuf varint at `at`, a tag or a length; returns it and the position after it."""
    number = 0
    for shift in range(0, 35, 7):
        if at >= len(raw):
            raise ValueError("a number that is cut off")
        byte = raw[at]
        at += 1
        if byte < 128:
            return number | byte << shift, at
        number |= (byte & 127) << shift
    raise ValueError("a number that is too long")


def _after_number(raw: bytes, at: int) -> int:
    """The position after the varint at `at`."""
    if (number := _ANY_NUMBER.match(raw, at)) is None:
        raise ValueError("a number that does not end")
    return number.end()
