"""A Python function as a scorer."""

import hashlib
import inspect
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        self.names = config.names
        source = source_of(self._function, config.function, "reward.args.scorer.function")
        self.identity = pb.ScorerIdentity(
            name=f"function:{config.function}",
            model_hash=hashlib.sha256(source.encode()).hexdigest(),
            names=config.names,
        )

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """The function's scores, [B, K]. FailedPrecondition, which names the function, if it raises or does not give
        for each pair one finite number, or one for each of its names."""
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
        numbers = self._named(scores, len(pairs)) if self.names else scores
        try:
            with np.errstate(over="ignore"):
                values = np.asarray(numbers, np.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise FailedPrecondition(f"{self._name} gave a {type(scores).__name__} that holds no numbers") from None
        if values.shape != ((len(pairs), len(self.names)) if self.names else (len(pairs),)):
            given = (
                f"{len(values)} scores" if values.ndim == 1 else f"a {type(scores).__name__} of shape {values.shape}"
            )
            raise FailedPrecondition(f"{self._name} gave {given} for {len(pairs)} pairs; should give one number each")
        values = values.reshape(len(pairs), max(1, len(self.names)))
        if not (finite := np.isfinite(values).all(axis=0)).all():
            which = f" of {self.names[int(np.argmin(finite))]}" if self.names else ""
            raise FailedPrecondition(f"{self._name} gave a score{which} that is not finite in float32")
        return values

    def _named(self, scores: Any, pairs: int) -> list[list[Any]]:
        """The numbers of each pair in the order of the names; FailedPrecondition unless the function gave a mapping
        of exactly these names for each."""
        should = f"for each pair a mapping of {', '.join(self.names)} to numbers"
        if not isinstance(scores, Sequence) or len(scores) != pairs:
            given = f"{len(scores)} values" if isinstance(scores, Sequence) else f"a {type(scores).__name__}"
            raise FailedPrecondition(f"{self._name} gave {given} for {pairs} pairs; should give {should}")
        for index, each in enumerate(scores):
            if not isinstance(each, Mapping) or {*each} != {*self.names}:
                names = ", ".join(sorted(map(str, each))) or "no name" if isinstance(each, Mapping) else ""
                given = names if isinstance(each, Mapping) else f"a {type(each).__name__}"
                raise FailedPrecondition(f"{self._name} gave {given} for pair {index}; should give {should}")
        return [[each[name] for name in self.names] for each in scores]

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
