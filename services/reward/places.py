"""Places in the text of a response, and the tokens that bring them."""

from bisect import bisect_left
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from quartet.wire.codec import Ints


def bringing(tokenizer: Any, ids: Ints, text: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens with which the text comes to hold so many characters. A character of several tokens is there with
    the last of them.

    Args:
        tokenizer: transformers' tokenizer.
        ids: [T] token ids.
        text: their text without special tokens.
        places: [P] numbers of characters, from 1 on.

    Returns:
        [P] indices of `ids`.
    """
    pieces = _streamed(getattr(tokenizer, "backend_tokenizer", None), ids)
    if pieces and text.startswith("".join(pieces)):
        tokens = np.searchsorted(np.cumsum([len(piece) for piece in pieces]), places)
        # What is left of a character that the response was cut off in comes with the last token.
        return np.minimum(tokens, len(ids) - 1)

    # Bytes of no character, or a tokenizer that cleans its texts up: decodes the beginnings that a search needs.
    @cache
    def there(tokens: int) -> int:
        return _common(tokenizer.decode(ids[:tokens], skip_special_tokens=True), text)

    found = [bisect_left(range(1, len(ids)), place, key=there) for place in places.tolist()]
    return np.asarray(found, np.int64)


def _common(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    return bisect_left(range(len(other)), True, key=lambda at: not one.startswith(other[: at + 1]))


def _streamed(backend: Any, ids: Ints) -> list[str]:
    """The text that each token adds; nothing if that is not known."""
    if backend is None:
        return []
    stream = DecodeStream(skip_special_tokens=True)
    try:
        return [stream.step(backend, token) or "" for token in ids.tolist()]
    except Exception:  # of no type of its own: a text that changes with the tokens after it
        return []
