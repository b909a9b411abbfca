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
from quartet.serving.batcher import SpoiltError
from quartet.wire.errors import FailedPrecondition
from quartet.wire.outcomes import Outcome, Unscored
from services.reward.config import FunctionScorerConfig
from services.reward.scorers.scorer import Result, Scored, results

MOST_REASON = 500
"""Most characters of a reason that a function gives."""
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

    def score(self, pairs: Sequence[Scored]) -> list[Result]:
        """The function's results.

        Raises:
            SpoiltError: the function raised; with the reason for the pair on which it does so alone.
            FailedPrecondition: it gave something other than one result for each pair; names the function.
        """
        try:
            scores = self._function([scored.pair for scored in pairs])
            scores = scores.tolist() if hasattr(scores, "tolist") else scores  # of torch, NumPy, pandas
        except Exception as error:
            if len(pairs) == 1:
                log.exception("%s failed", self._name)
            # Without the error's text, which may hold secrets.
            reason = (
                f"{self._name} raised {type(error).__name__} in {self._place(error)}; see the reward service's log "
                f"for its text: {_log_name()} in `serve` of the folder of logs that `quartet up` names"
            )
            outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.FAILED
            raise SpoiltError(Unscored(outcome, reason)) from None
        should = (
            f"should give for each pair a mapping of {', '.join(self.names)} to numbers"
            if self.names
            else "should give one number each"
        )
        if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != len(pairs):
            given = f"{len(scores)} scores" if isinstance(scores, Sequence) else f"a {type(scores).__name__}"
            raise FailedPrecondition(f"{self._name} gave {given} for {len(pairs)} pairs; {should}")
        return [self._result(each, f"{self._name} gave {{}} for pair {n}; {should}") for n, each in enumerate(scores)]

    def _result(self, given: Any, problem: str) -> Result:
        """The scores of a pair in the order of the names. FailedPrecondition, with what was given put into `problem`,
        if they are none."""
        if given is None:
            return Unscored(Outcome.NOT_APPLICABLE, f"{self._name} gave None")
        if isinstance(given, Unscored):
            if given.outcome not in [*Outcome][1:]:
                raise FailedPrecondition(problem.format(f"an Unscored of outcome {given.outcome!r}"))
            # The user's own text, which the reply has to be able to hold.
            text = str(given.reason)[:MOST_REASON].encode(errors="replace").decode()
            return Unscored(Outcome(given.outcome), text)
        numbers = [given]
        if self.names:
            if not isinstance(given, Mapping):
                raise FailedPrecondition(problem.format(f"a {type(given).__name__}"))
            if {*given} != {*self.names}:
                raise FailedPrecondition(problem.format(", ".join(sorted(map(str, given))) or "no name"))
            numbers = [given[name] for name in self.names]
        try:
            with np.errstate(over="ignore"):
                values = np.asarray(numbers, np.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise FailedPrecondition(problem.format("something that is no number")) from None
        if values.ndim != 1:
            raise FailedPrecondition(problem.format(f"a {type(given).__name__}"))
        [result] = results(values[None], self._name)
        return result

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
