"""Bounds of a JSON text, checked before it is parsed: what a few bytes can stand for takes much memory and time."""

import re

from quartet.wire.errors import InvalidArgument

DEEPEST = 32
"""Most levels of lists and objects."""
MOST_ELEMENTS = 131_072
"""Most elements of lists and members of objects together, ids of tokens included."""
# A string that does not end is one to the end of the text: looked for again at each quote, it would take the time of
# the text's length squared.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[{\]}]")
_OPENING = b"[{"


def check_bounds(text: bytes) -> None:
    """Returns if a JSON text keeps within the bounds, whether or not it is right otherwise.

    Raises:
        InvalidArgument: it does not.
    """
    bare = _STRING.sub(b"", text)
    opened, closed = bare.count(b"[") + bare.count(b"{"), bare.count(b"]") + bare.count(b"}")
    elements = bare.count(b",") + max(opened, closed)
    if elements > MOST_ELEMENTS:
        raise InvalidArgument(f"the body has more than {MOST_ELEMENTS} elements; send several requests")
    depth = 0
    for bracket in _BRACKET.findall(bare):
        depth += 1 if bracket in _OPENING else -1
        if depth > DEEPEST:
            raise InvalidArgument(f"the body's lists and objects are more than {DEEPEST} levels deep")
