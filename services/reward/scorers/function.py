"""A Python function as a scorer."""

import hashlib
import inspect
import logging
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from protos import reward_pb2 as pb
from quartet.config.functions import load_function, source_of
from quartet.wire.codec import Floats
from quartet.wire.errors import FailedPrecondition
from services.reward.config import FunctionScorerConfig
from services.reward.scorers.scorer import Scored

log = logging.getLogger("ray.serve")  # whose lines are in logs/serve, a file for each replica


class FunctionScorer:
    """Scores texts by the user's Python function."""

    def __init__(self, config: FunctionScorerConfig) -> None:
        self._function = load_function(config.function)
        self._name = config.function
        self.max_length = 1 << 30
        self.batch_tokens = config.batch_tokens
        self.texts = True
        self.vocab_size: int | None = None
        source = source_of(self._function, config.function, "reward.args.scorer.function")
        self.identity = pb.ScorerIdentity(
            name=f"function:{config.function}",
            model_hash=hashlib.sha256(source.encode()).hexdigest(),
            weight=1.0,
        )

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """The function's scores, [B]. FailedPrecondition, which names the function, if it raises or does not give one
        finite number per pair."""
        try:
            scores = self._function([scored.pair for scored in pairs])
            scores = scores.tolist() if hasattr(scores, "tolist") else scores  # of torch, NumPy, pandas
        except Exception as error:
            log.exception("%s failed", self._name)
            # Without the error's text, which may hold secrets.
            raise FailedPrecondition(
                f"{self._name} raised {type(error).__name__} in {self._place(error)}; see the reward service's log "
                f"for its text: {_log_name()} in `serve` of the folder of logs that `quartet up` names"
            ) from None
        try:
            with np.errstate(over="ignore"):
                values = np.asarray(scores, np.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise FailedPrecondition(f"{self._name} gave a {type(scores).__name__} that holds no numbers") from None
        if values.shape != (len(pairs),):
            given = (
                f"{len(values)} scores" if values.ndim == 1 else f"a {type(scores).__name__} of shape {values.shape}"
            )
            raise FailedPrecondition(f"{self._name} gave {given} for {len(pairs)} pairs; should give one number each")
        if not np.isfinite(values).all():
            raise FailedPrecondition(f"{self._name} gave a score that is not finite in float32")
        return values

    def check(self) -> None:
        """Does nothing, since a function may rightly refuse a made-up pair."""

    def _place(self, error: Exception) -> str:
        """The last line of the function's own file on the way to the error, or else the line that raised it."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(inspect.getmodule(self._function), "__file__", None)
        own = [frame for frame in frames if frame.filename == file]
        frame = (own or frames)[-1]
        return f"line {frame.lineno} of {Path(frame.filename).name}"


def _log_name() -> str:
    """The name of the file to which this process's log goes, behind a buffer of Serve's."""
    for handler in log.handlers:
        file = getattr(getattr(handler, "target", None) or handler, "baseFilename", None)
        if file:
            return Path(file).name
    return "a file for each replica"
