"""Makes scorers from their configuration, and one of several."""

import asyncio
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from protos import reward_pb2 as pb
from quartet.serving.batcher import SpoiltError
from quartet.threads import DaemonThread
from quartet.wire.codec import Floats
from quartet.wire.outcomes import Unscored
from services.reward.config import ModelScorerConfig, ScorerConfig, SeveralScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import Result, Scored, Scorer


class SeveralScorers:
    """Several scorers as one, whose scores are those of all of them."""

    def __init__(self, config: SeveralScorerConfig, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = scorers
        self.names = config.names
        self.max_length = min(scorer.max_length for scorer in scorers.values())
        self.batch_tokens = min(scorer.batch_tokens for scorer in scorers.values())
        self.texts = any(scorer.texts for scorer in scorers.values())
        self.passes = max(scorer.passes for scorer in scorers.values())
        alone = all(scorer.batch_s is not None for scorer in scorers.values())
        self.batch_s = max(scorer.batch_s or 0.0 for scorer in scorers.values()) if alone else None
        self.patience_s = max(each.patience_s or 0.0 for each in scorers.values()) or None
        self._thread = DaemonThread("scorer")
        sizes = [scorer.vocab_size for scorer in scorers.values() if scorer.vocab_size is not None]
        self.vocab_size = min(sizes) if sizes else None
        parts = [scorer.identity for scorer in scorers.values()]
        named = pb.ScorerIdentity(names=self.names, parts=parts).SerializeToString(deterministic=True)
        digest = hashlib.sha256(named)
        self.identity = pb.ScorerIdentity(
            name="several", model_hash=digest.hexdigest(), names=self.names, parts=parts
        )

    async def score(self, pairs: Sequence[Scored]) -> list[Result]:
        """The scores of each pair by all scorers; a pair that one of them does not score is not scored. Raises as
        they do."""
        by_scorer = list[Sequence[Result]]()
        for name, scorer in self._scorers.items():
            try:
                by_scorer.append(await self._by(scorer, pairs))
            except SpoiltError as error:
                raise SpoiltError(_of(name, error.result), error.suspect) from None
        return [self._joined(each) for each in zip(*by_scorer, strict=True)]

    async def _by(self, scorer: Scorer, pairs: Sequence[Scored]) -> Sequence[Result]:
        """The results of one of them. Those of a model do not end before it does, so that one that hangs is seen."""
        if inspect.iscoroutinefunction(scorer.score):
            found: Sequence[Result] = await scorer.score(pairs)
            return found
        computed: Future[Sequence[Result]] = self._thread.submit(scorer.score, pairs)
        cancelled = False
        while not computed.done():
            try:
                await asyncio.shield(asyncio.wrap_future(computed))
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return computed.result()

    def _joined(self, results: Sequence[Result]) -> Result:
        scores = list[Floats]()
        for name, result in zip(self._scorers, results, strict=True):
            if isinstance(result, Unscored):
                return _of(name, result)
            scores.append(result)
        return np.concatenate(scores)

    def check(self) -> None:
        """Checks each of them."""
        for scorer in self._scorers.values():
            scorer.check()


def _of(name: str, unscored: Unscored) -> Unscored:
    """The same, by the scorer of this name."""
    return replace(unscored, reason=f"{name}: {unscored.reason}")


def make_scorer(
    config: ScorerConfig, tokenizer: Any, device: torch.device, where: str = "reward.args.scorer"
) -> Scorer:
    """The scorer that the configuration describes, at `where`. ConfigError if it cannot be made."""
    if isinstance(config, ModelScorerConfig):
        return ModelScorer(config, tokenizer, device)
    if isinstance(config, SeveralScorerConfig):
        made = {
            name: make_scorer(each, tokenizer, device, f"{where}.scorers.{name}")
            for name, each in config.scorers.items()
        }
        return SeveralScorers(config, made)
    return FunctionScorer(config, where)
