"""Functions as a user's scorers have them, some of whose calls go wrong. Imports nothing that takes time."""

import os
import threading
import time
from collections.abc import Sequence

from quartet.wire.pairs import Pair

PAIR_S = 0.01
"""Processor time of a pair of `works`."""
FAULTS = ("hangs", "leaks", "exits")
"""Labels of pairs that go wrong."""
HELD: list[bytes] = []


def count(pairs: Sequence[Pair]) -> list[float]:
    """Words of the responses: as cheap as functions are."""
    return [float(len(pair.response.split())) for pair in pairs]


def works(pairs: Sequence[Pair]) -> list[float]:
    """The same, after some work for each pair; does what the label says."""
    scores = []
    for pair in pairs:
        end = time.thread_time() + PAIR_S
        while time.thread_time() < end:
            pass
        if pair.label == "hangs":
            threading.Event().wait()
        if pair.label == "leaks":
            HELD.append(bytes(512 << 20))  # which takes no time, as the kernel fills none of it
        if pair.label == "exits":
            os._exit(1)
        scores += count([pair])
    return scores
