"""Checks that a client makes of every reply before it uses it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from quartet.wire.codec import Floats
from quartet.wire.errors import InvalidArgument, InvalidReply


@contextmanager
def reading(call: str) -> Iterator[None]:
    """Context that turns InvalidArgument, raised while a reply is decoded, into InvalidReply."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidReply(f"{call}: {error}") from None


def one_each(values: Floats, count: int, field: str, of: str = "pairs") -> Floats:
    """Returns the values; InvalidArgument unless there is one for each of `count` things that `of` names."""
    if len(values) != count:
        raise InvalidArgument(f"{field}: {len(values)} values for {count} {of}; there must be one each")
    return values


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics; InvalidArgument, which names the wrong ones, unless all are finite."""
    if wrong := [f"{name} is {value}" for name, value in metrics.items() if not np.isfinite(value)]:
        raise InvalidArgument(f"metrics: {', '.join(wrong)}; must be finite")
    return dict(metrics)
