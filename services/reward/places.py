"""Places in the text of a response, and the tokens that bring them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from quartet.wire.codec import Ints


def characters(tokenizer: Any, ids: Ints, text: str) -> NDArray[np.int64]:
    """Number of characters of a text that are there with each of its tokens and those before it. A character of
    several tokens is there with the last of them.

    Args:
        tokenizer: transformers' tokenizer.
        ids: [T] token ids.
        text: their text without special tokens.

    Returns:
        [T], ascending.
    """
    pieces = _streamed(getattr(tokenizer, "backend_tokenizer", None), ids)
    if pieces and text.startswith("".join(pieces)):
        streamed = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        streamed[-1] = len(text)  # with what is left of a character that the response was cut off in
        return streamed
    # Bytes of no character, or a tokenizer that cleans its texts up: slow, and right.
    lengths = [len(tokenizer.decode(ids[: end + 1], skip_special_tokens=True)) for end in range(len(ids))]
    return np.maximum.accumulate(np.minimum(lengths, len(text)), dtype=np.int64)


def _streamed(backend: Any, ids: Ints) -> list[str]:
    """The text that each token adds; nothing if that is not known."""
    if backend is None:
        return []
    stream = DecodeStream(skip_special_tokens=True)
    try:
        return [stream.step(backend, token) or "" for token in ids.tolist()]
    except Exception:  # of no type of its own: a text that changes with the tokens after it
        return []


def sampled_places(
    places: NDArray[np.int64], brought: NDArray[np.int64], sampled: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Number of sampled tokens up to the one that earns what is at these places of a response.

    Args:
        places: [P] numbers of characters, from 1 on.
        brought: [T] of `characters`.
        sampled: [T] True at tokens that were sampled, the first of them too. A part at one that was given, such as in
            an environment's answer, is earned by the last that was sampled before it.

    Returns:
        [P] from 1 on.
    """
    tokens = np.minimum(np.searchsorted(brought, places), len(brought) - 1)
    counted: NDArray[np.int64] = np.cumsum(sampled, dtype=np.int64)[tokens]
    return counted
