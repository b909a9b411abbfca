"""A scorer with faults, each where a response asks for it."""

import os
import time
from collections.abc import Sequence
from typing import Any

from quartet.wire.pairs import Pair


def score(pairs: Sequence[Pair]) -> list[Any]:
    """Characters of each response."""
    scores: list[Any] = []
    for pair in pairs:
        match pair.response:
            case "hang":
                time.sleep(3600)
            case "exception":
                raise ValueError("a secret")
            case "exit":
                os._exit(3)
            case "nan":
                scores.append(float("nan"))
            case "length":
                scores += [0.0, 0.0]
            case response:
                scores.append(float(len(response)))
    return scores
