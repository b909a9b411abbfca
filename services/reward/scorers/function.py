"""A scorer whose scores a Python function gives: the user's, or that of one of the kinds in `kinds`."""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from protos import reward_pb2 as pb
from quartet.config.base import GIB, ConfigError
from quartet.serving.batcher import SpoiltError
from quartet.wire.errors import FailedPrecondition
from quartet.wire.outcomes import Outcome, Unscored
from services.reward.kinds import AnyWorkerScorerConfig, FunctionScorerConfig
from services.reward.scorers.scorer import EncodedPair, InParts, Result, results
from services.reward.scorers.workers import EndedError, LateError, Setting, StartError, Workers

MOST_REASON = 500
"""Most characters of a reason that a function gives."""
_MOST_LOGGED = 4
"""Most errors of one call whose text is written to the log."""
log = logging.getLogger("ray.serve")  # whose lines are in logs/serve, a file for each replica


class FunctionScorer:
    """Scores texts by a function in worker processes, of which each has one batch at a time."""

    max_length = 1 << 30
    texts = True
    vocab_size: int | None = None
    batch_s: float | None = math.inf  # a worker that does not go on is killed

    def __init__(self, config: AnyWorkerScorerConfig, where: str = "reward.args.scorer") -> None:
        """`where` is the scorer's place in the configuration. ConfigError if the function cannot be called."""
        config.check_machine(where)
        self._name = config.title.removeprefix("function:")
        self._config = config
        self._process = isinstance(config, FunctionScorerConfig) and config.process
        self.batch_tokens = config.batch_tokens
        self.names = config.names
        self.passes = config.workers
        self.patience_s: float | None = 8 * config.pair_timeout_s
        setting = Setting(
            function=config.function_path,
            options=config.options,
            names=config.names,
            field=f"{where}.{config.FIELD}",
            memory_bytes=int(config.memory_gib * GIB),
            concurrency=config.concurrency,
            variables=config.variables,
            process=self._process,
        )
        try:
            self._workers = Workers(setting)
        except StartError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(setting.field) else f"{setting.field}: {text}") from None
        digest = hashlib.sha256((config.source + self._workers.source).encode()).hexdigest()
        self.identity = pb.ScorerIdentity(
            name=config.title, model_hash=digest, names=self.names, process=self._process
        )

    async def score(self, pairs: Sequence[EncodedPair]) -> list[Result]:
        """The function's results.

        Raises:
            SpoiltError: the function raised, took too long or ended its process; with the reason for the pair on
                which it does so alone.
            FailedPrecondition: it gave something other than one result for each pair; names the function.
        """
        texts = [scored.pair for scored in pairs]
        seconds = [min(self._config.pair_timeout_s, pair.timeout_s or math.inf) for pair in texts]
        # What other calls have left in a process, such as a thread that ends it, is no pair's fault.
        alone = False
        for again in (False, True):
            try:
                answer = await self._workers.call(texts, seconds, fresh=again, alone=alone)
                if again or len(pairs) > 1 or not answer.get("ends"):
                    break
            except EndedError as error:
                if not again and (not error.called or len(pairs) == 1):
                    alone = error.with_origin
                    continue
                reason = f"{self._name}: its process {error}"
                raise SpoiltError(Unscored(Outcome.FAILED, reason), error.at) from None
            except LateError as error:
                raise SpoiltError(Unscored(Outcome.TIMEOUT, self._late(error.seconds)), error.at) from None
            except StartError as error:
                # No pair's fault, so that nothing is gained by trying each; the text is the user's.
                log.error("%s could not be started: %s", self._name, error)
                return [Unscored(Outcome.FAILED, f"{self._name} could not be started; {_see_log()}")] * len(pairs)
        try:
            return self._results(answer, len(pairs))
        except (ValueError, TypeError, KeyError, AttributeError):
            # Of a process that the function has changed.
            raise SpoiltError(Unscored(Outcome.FAILED, f"{self._name}: its process sent no answer")) from None

    def check(self) -> None:
        """Raises RuntimeError if no process can be started any more. Does not call the function, which may rightly
        refuse a made-up pair."""
        if self._workers.problem:
            raise RuntimeError(f"{self._name}: {self._workers.problem}")

    def _results(self, answer: Mapping[str, Any], pairs: int) -> list[Result]:
        """The results in an answer, of which nothing is taken as given. ValueError and the like if it is none."""
        should = (
            f"should give for each pair a mapping of {', '.join(self.names)} to numbers"
            if self.names
            else f"should give one number{' or ProcessReward' * self._process} each"
        )
        if (defect := answer.get("defect")) is not None:
            raise FailedPrecondition(f"{self._name} gave {_plain(defect)}; {should}")
        if (raised := answer.get("raised")) is not None:
            if pairs == 1:
                self._log(raised)
            raise SpoiltError(self._raised(raised), answer["at"])
        values = np.frombuffer(answer["scores"], np.float64).reshape(pairs, len(self.names) or 1)
        with np.errstate(over="ignore"):
            found = results(values.astype(np.float32), self._name)
        found = self._with_parts(found, answer)
        unscored = {int(row): why for row, why in answer["unscored"]}
        for row in range(pairs if pairs > 1 else 0):
            if (raised := unscored.get(row, {}).get("raised")) and raised["memory"]:
                # Of a coroutine function, whose pairs have the memory together.
                raise SpoiltError(self._raised(raised), row)
        for why in [why["raised"] for why in unscored.values() if "raised" in why][:_MOST_LOGGED]:
            self._log(why)
        return [self._unscored(unscored[row]) if row in unscored else each for row, each in enumerate(found)]

    def _with_parts(self, found: list[Result], answer: Mapping[str, Any]) -> list[Result]:
        """The results with the parts of their scores."""
        rows, places = (np.frombuffer(answer[name], np.int64) for name in ("part_rows", "part_places"))
        with np.errstate(over="ignore"):
            rewards = np.frombuffer(answer["part_rewards"], np.float64).astype(np.float32)
        starts = np.searchsorted(rows, np.arange(len(found) + 1)).tolist()
        if starts[0] or not starts[-1] == len(rows) == len(places) == len(rewards) or (places < 1).any():
            raise ValueError("parts of no pairs, or at no places")
        whole = list(found)
        for row, (start, end) in enumerate(pairwise(starts)):
            score = found[row]
            if start < end and isinstance(score, np.ndarray):
                [earned] = results(rewards[None, start:end], self._name)
                whole[row] = InParts(score, places[start:end], earned) if isinstance(earned, np.ndarray) else earned
        return whole

    def _unscored(self, why: Mapping[str, Any]) -> Unscored:
        """The outcome of a pair for which the function gave no score."""
        if "none" in why:
            return Unscored(Outcome.NOT_APPLICABLE, f"{self._name} gave None")
        if "late" in why:
            return Unscored(Outcome.TIMEOUT, self._late(float(why["late"])))
        if "raised" in why:
            return self._raised(why["raised"])
        outcome = Outcome(why["outcome"])
        if outcome is Outcome.SCORED:
            raise ValueError("a score without a number")
        return Unscored(outcome, _plain(why["reason"]))

    def _raised(self, raised: Mapping[str, Any]) -> Unscored:
        """The outcome of an error, without its text, which may hold secrets."""
        if raised["memory"]:
            return Unscored(
                Outcome.FAILED, f"{self._name} needs more memory than memory_gib, {self._config.memory_gib:g}, allows"
            )
        place = f"line {int(raised['line'])} of {Path(_plain(raised['file'])).name}"
        return Unscored(
            Outcome.TIMEOUT if raised["late"] else Outcome.FAILED,
            f"{self._name} raised {_plain(raised['name'])} in {place}; {_see_log()}",
        )

    def _late(self, seconds: float) -> str:
        whose = "pair_timeout_s" if seconds >= self._config.pair_timeout_s else "the caller's pair_timeout_s"
        return f"{self._name} took longer for a pair than {whose}, {seconds:g} s"

    def _log(self, raised: Mapping[str, Any]) -> None:
        log.error("%s failed\n%s", self._name, str(raised["trace"]).encode(errors="replace").decode())


def _plain(text: Any) -> str:
    """The user's own text, which the reply has to be able to hold."""
    return str(text)[:MOST_REASON].encode(errors="replace").decode()


def _see_log() -> str:
    """The place of what replies do not say, as it may hold secrets."""
    return (
        f"see the reward service's log for its text: {_log_name()} in `serve` of the folder of logs that "
        "`quartet up` names"
    )


def _log_name() -> str:
    """The name of the file to which this process's log goes, behind a buffer of Serve's."""
    for handler in log.handlers:
        file = getattr(getattr(handler, "target", None) or handler, "baseFilename", None)
        if file:
            return Path(file).name
    return "a file for each replica"
