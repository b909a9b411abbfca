"""Makes scorers from their configuration, and one of several."""

import asyncio
import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from protos import reward_pb2 as pb
from quartet.serving.batcher import HungError, SpoiltError
from quartet.threads import DaemonThread
from quartet.wire.codec import Floats
from quartet.wire.outcomes import Unscored
from services.reward.config import DEFAULT_LIMITS, ModelScorerConfig, ScorerConfig, SeveralScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import EncodedPair, InParts, Result, Scorer


class SeveralScorers:
    """Several scorers as one, whose scores are those of all of them."""

    def __init__(self, config: SeveralScorerConfig, scorers: Mapping[str, Scorer], batch_s: float) -> None:
        """`batch_s` is the deadline of each model's part of a batch, in seconds."""
        self._scorers = scorers
        self.names = config.names
        self.max_length = min(scorer.max_length for scorer in scorers.values())
        self.batch_tokens = min(scorer.batch_tokens for scorer in scorers.values())
        self.texts = any(scorer.texts for scorer in scorers.values())
        self.passes = max(scorer.passes for scorer in scorers.values())
        self.batch_s: float | None = math.inf  # as each of them has its own deadline
        self._model_s = batch_s
        self.patience_s: float | None = max(each.patience_s or batch_s for each in scorers.values())
        self._thread, self._turn = DaemonThread("scorer"), asyncio.Lock()
        sizes = [scorer.vocab_size for scorer in scorers.values() if scorer.vocab_size is not None]
        self.vocab_size = min(sizes) if sizes else None
        parts = [scorer.identity for scorer in scorers.values()]
        named = pb.ScorerIdentity(names=self.names, parts=parts).SerializeToString(deterministic=True)
        digest = hashlib.sha256(named)
        self.identity = pb.ScorerIdentity(
            name="several", model_hash=digest.hexdigest(), names=self.names, parts=parts
        )

    async def score(self, pairs: Sequence[EncodedPair]) -> list[Result]:
        """The scores of each pair by all scorers; a pair that one of them does not score is not scored. Raises as
        they do."""
        by_scorer = list[Sequence[Result]]()
        for name in self._scorers:
            try:
                by_scorer.append(await self._by(name, pairs))
            except SpoiltError as error:
                raise SpoiltError(_of(name, error.result), error.suspect) from None
        return [self._joined(each) for each in zip(*by_scorer, strict=True)]

    async def _by(self, name: str, pairs: Sequence[EncodedPair]) -> Sequence[Result]:
        """The results of one of them. Models compute one batch at a time, and what waits for its turn does not
        hang."""
        scorer = self._scorers[name]
        if inspect.iscoroutinefunction(scorer.score):
            found: Sequence[Result] = await scorer.score(pairs)
            return found
        async with self._turn:
            computed: asyncio.Future[Sequence[Result]] = asyncio.wrap_future(self._thread.submit(scorer.score, pairs))
            done, _ = await asyncio.wait({computed}, timeout=self._model_s)
            if not done:
                raise HungError(f"{name} has run for longer than batch_s, {self._model_s:g} s")
        return computed.result()

    def _joined(self, results: Sequence[Result]) -> Result:
        scores = list[Floats]()
        for name, result in zip(self._scorers, results, strict=True):
            if isinstance(result, Unscored):
                return _of(name, result)
            scores.append(result.score if isinstance(result, InParts) else result)
        return np.concatenate(scores)

    def check(self) -> None:
        """Checks each of them."""
        for scorer in self._scorers.values():
            scorer.check()


def _of(name: str, unscored: Unscored) -> Unscored:
    """The same, by the scorer of this name."""
    return replace(unscored, reason=f"{name}: {unscored.reason}")


def make_scorer(
    config: ScorerConfig,
    tokenizer: Any,
    device: torch.device,
    where: str = "reward.args.scorer",
    batch_s: float = DEFAULT_LIMITS.batch_s,
) -> Scorer:
    """The scorer that the configuration describes, at `where`, whose models have `batch_s` for a batch. ConfigError
    if it cannot be made."""
    if isinstance(config, ModelScorerConfig):
        return ModelScorer(config, tokenizer, device, where)
    if isinstance(config, SeveralScorerConfig):
        made = {
            name: make_scorer(each, tokenizer, device, f"{where}.scorers.{name}", batch_s)
            for name, each in config.scorers.items()
        }
        return SeveralScorers(config, made, batch_s)
    return FunctionScorer(config, where)
