"""Calls of pairs to a scorer through a batcher, as a replica has it."""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from quartet.serving.batcher import Batcher
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.outcomes import Unscored
from quartet.wire.pairs import Pair
from services.reward.config import ScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.scorer import EncodedPair, InParts, Result

NO_IDS = np.zeros(1, np.int32)


class Call:
    """A call of pairs."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.costs = np.ones(len(pairs), np.int32)
        self._pairs = pairs
        self.results: dict[int, Result] = {}

    def items(self, rows: Sequence[int]) -> list[EncodedPair]:
        """The pairs."""
        return [row(self._pairs[number]) for number in rows]

    def put(self, rows: Sequence[int], results: Sequence[Result]) -> None:
        """Keeps the results."""
        self.results |= dict(zip(rows, results, strict=True))

    @property
    def told(self) -> list[Any]:
        """The scores, and the outcomes of pairs without one."""
        ordered = [self.results[row] for row in range(len(self._pairs))]
        return [
            each.outcome.name
            if isinstance(each, Unscored)
            else (each.score if isinstance(each, InParts) else each)[0]
            for each in ordered
        ]

    def reason(self, row: int) -> str:
        """The reason for which a pair is not scored."""
        result = self.results[row]
        assert isinstance(result, Unscored)
        return result.reason


def row(pair: Pair) -> EncodedPair:
    """A pair without ids."""
    return EncodedPair(NO_IDS, NO_IDS, pair)


def batcher(made: FunctionScorer) -> Batcher[EncodedPair, Result]:
    """A batcher with the settings that the replica gives it."""
    return Batcher(made.score, batch_tokens=1000, batch_s=math.inf, passes=made.passes, patience_s=made.patience_s)


def section(settings: dict[str, Any]) -> Any:
    """The section with these settings."""
    return TypeAdapter[Any](ScorerConfig).validate_json(json.dumps(settings))


def make(settings: dict[str, Any]) -> FunctionScorer:
    """The scorer of a section."""
    return FunctionScorer(section(settings))


def ask(made: FunctionScorer, *pairs: Pair) -> Call:
    """The call of these pairs to the scorer alone, when it is answered."""

    async def asked() -> Call:
        return await scored(batcher(made), pairs)

    return asyncio.run(asked())


async def called(passes: Batcher[EncodedPair, Result], *labels: str) -> Call:
    """The call of pairs with these labels, each with a response of one word, when it is answered."""
    return await scored(passes, [Pair("w1", "w2", label) for label in labels])


async def scored(passes: Batcher[EncodedPair, Result], pairs: Sequence[Pair]) -> Call:
    """The call of these pairs, when it is answered."""
    call = Call(pairs)
    await passes.submit(Share("run", Purpose.TRAINING), call)
    return call
