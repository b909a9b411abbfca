"""A JSON object that a stranger sent."""

import json
import math
from collections import Counter
from typing import Any, NoReturn

from quartet.wire.errors import InvalidArgument


def json_object(body: bytes) -> dict[str, Any]:
    """The object that a body holds: in UTF-8, with finite numbers, each key once, and text that can be sent on.

    Raises:
        InvalidArgument: it holds something else.
    """
    try:
        # As UTF-8 alone, in which the bounds were checked; json would take other encodings of bytes too.
        request = strict_json(body.decode(), object_pairs_hook=_each_once)
        json.dumps(request, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument("the body holds half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise InvalidArgument(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict):
        raise InvalidArgument("the body should be a JSON object")
    return request


def strict_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text, as `json.loads` gives it. ValueError for NaN and the infinities, which JSON does not
    have, and for a number beyond 64 bits."""
    return json.loads(text, parse_float=_finite, parse_constant=not_a_number, **options)


def whole_characters(text: str) -> str:
    """The text with a question mark in place of each half of a surrogate pair, which JSON's escapes can write, but no
    UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is larger than any number of 64 bits")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. ValueError if it has a key twice, of which programs before this one may have read the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:64]!r} is in an object twice")
    return found


def not_a_number(text: str) -> NoReturn:
    """Refuses a constant that JSON does not have, for `json.loads`."""
    raise ValueError(f"{text} is not a JSON number")
