"""A Python function as a scorer."""

import hashlib
import inspect
from collections.abc import Sequence

import numpy as np

from protos import reward_pb2 as pb
from services.common.config.base import ConfigError
from services.common.config.functions import load_function
from services.common.wire.codec import Floats
from services.reward.config import (
    FunctionScorerConfig,
)
from services.reward.scorers.scorer import Scored


class FunctionScorer:
    """Scores texts by the user's Python function."""

    def __init__(self, config: FunctionScorerConfig) -> None:
        self._function = load_function(config.function)
        self._name = config.function
        self.max_length = 1 << 30
        self.batch_tokens = config.batch_tokens
        self.texts = True
        self.keeps = False
        self.vocab_size: int | None = None
        try:
            source = inspect.getsource(inspect.getmodule(self._function) or self._function)
        except (OSError, TypeError):
            raise ConfigError(
                f"reward.args.scorer.function: {config.function} has no Python source to identify it by"
            ) from None
        self.identity = pb.ScorerIdentity(
            name=f"function:{config.function}",
            model_hash=hashlib.sha256(source.encode()).hexdigest(),
            weight=1.0,
        )

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """The function's scores, [B]. RuntimeError, which names the function, unless it gives one finite number per
        pair."""
        scores = self._function([scored.pair for scored in pairs])
        if len(scores) != len(pairs):
            raise RuntimeError(f"{self._name} gave {len(scores)} scores for {len(pairs)} pairs")
        with np.errstate(over="ignore"):
            values = np.asarray(scores, np.float32)
        if not np.isfinite(values).all():
            raise RuntimeError(f"{self._name} gave a score that is not finite in float32")
        return values

    def check(self) -> None:
        """Does nothing, since a function may rightly refuse a made-up pair."""
