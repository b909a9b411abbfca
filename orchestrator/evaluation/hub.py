"""A reward service at an address, and several of its scorers, each by its name there."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from orchestrator.evaluation.rows import Row
from quartet.config.base import LAST_PORT, ConfigError
from quartet.security import credentials
from quartet.wire.errors import InvalidArgument, InvalidReply, ResourceExhausted, Unavailable
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import SCORE
from services.reward.client import RewardClient, Scores

REACH_S = 3.0
"""Longest wait for a connection, in seconds."""
SCORES, OUTCOMES, REASONS, SCORERS = "scores", "outcomes", "reasons", "scorers"
"""Columns of a row that has been scored."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A scorer's identity."""

    name: str
    """Description by the service, such as `model:reward` or `function:my_reward:score`."""
    hash: str
    """sha256 of the model's files or of the function's source."""
    measures: tuple[str, ...]
    """Names of the numbers that it gives for a row: its own name, or that with the name of each of its scores."""
    asked: str
    """Name in requests; empty for the only one of a service, if it has none."""

    def written(self) -> dict[str, str]:
        """The identity as rows and results have it."""
        return {"name": self.name, "hash": self.hash}


@dataclass(slots=True)
class Verdict:
    """A row's scores by all scorers that were asked."""

    scores: dict[str, float | None] = field(default_factory=dict)
    """Measure -> the number; None for a row that its scorer has not scored."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Scorer -> outcome, in lower case."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Scorer -> the reason why it has not scored the row."""

    def on(self, values: Mapping[str, Any], scorers: Mapping[str, Scorer]) -> dict[str, Any]:
        """A row's columns with the verdict and its scorers, beside what others said of it before."""
        given: dict[str, Mapping[str, Any]] = {
            SCORES: self.scores,
            OUTCOMES: self.outcomes,
            REASONS: self.reasons,
            SCORERS: {name: scorer.written() for name, scorer in scorers.items()},
        }
        return {**values, **{name: {**values.get(name, {}), **added} for name, added in given.items()}}


def check_free(row: Row, scorers: Mapping[str, Scorer], name: str) -> None:
    """Raises ConfigError if a column of the row, which is of the file `name`, would be overwritten by a verdict."""
    for column in (SCORES, OUTCOMES, REASONS, SCORERS):
        there = row.values.get(column, {})
        if not isinstance(there, dict):
            raise ConfigError(f"{name}, line {row.line}: {column}: should be a mapping, as it is filled; rename it")
    taken = {*row.values.get(SCORERS, {}), *row.values.get(SCORES, {})}
    for scorer, its in scorers.items():
        if doubled := taken & {scorer, *its.measures}:
            raise ConfigError(f"{name}, line {row.line}: scores: has been scored by {min(doubled)}; take it out")


class Hub:
    """Asks scorers of one service for verdicts. A context, which closes the connection."""

    def __init__(self, client: RewardClient, scorers: Mapping[str, Scorer], timeout_s: float) -> None:
        """
        Args:
            client: of the service.
            scorers: those that are asked, by name.
            timeout_s: deadline of a call, in seconds.
        """
        self._client, self.scorers, self._timeout_s = client, scorers, timeout_s

    @classmethod
    async def at(cls, target: str, application: str, names: Sequence[str], timeout_s: float) -> Self:
        """Connects to host:port with the credentials that the environment names.

        Args:
            target: host:port of the service.
            application: name of its application.
            names: the scorers to ask; empty: the only one.
            timeout_s: deadline of a call, in seconds.

        Raises:
            ConfigError: a scorer of this name does not exist, or only one end has TLS.
            ServiceError: the service does not answer.
        """
        if not (form := re.fullmatch(r"[^/\s]+:(\d{1,5})", target, re.ASCII)) or int(form[1]) > LAST_PORT:
            raise ConfigError(f"--hub: should be HOST:PORT, got {target!r}")
        client = RewardClient(credentials.connect(target), application)
        try:
            if not await client.reachable(REACH_S):
                await credentials.check_tls(target)
                raise Unavailable(
                    f"--hub: no answer at {target} within {REACH_S:g} s; `quartet up FILE` starts a hub"
                )
            return await cls.asked(client, names, timeout_s)
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def asked(cls, client: RewardClient, names: Sequence[str], timeout_s: float) -> Self:
        """The scorers of these names, as the service describes them. Raises as `at` does."""
        there = {each.name: each.identity for each in await client.scorers(timeout_s)}
        wanted = list(dict.fromkeys(names)) or ([*there] if len(there) == 1 else [])
        if not wanted or (unknown := [name for name in wanted if name not in there]):
            given = f"{unknown[0]!r} is none of those there are" if wanted else "required, as there are several"
            raise ConfigError(f"--scorer: {given}: {', '.join(sorted(there)) or 'one without a name'}")
        if late := [name for name in wanted if not there[name].name]:
            raise Unavailable(f"--scorer: {late[0] or SCORE} has not started yet; ask again when it has")
        scorers = {
            name or SCORE: Scorer(
                there[name].name,
                there[name].model_hash,
                tuple(f"{name}.{each}" if name else each for each in there[name].names) or (name or SCORE,),
                name,
            )
            for name in wanted
        }
        measures = Counter(measure for scorer in scorers.values() for measure in scorer.measures)
        if doubled := [measure for measure, count in measures.items() if count > 1]:
            raise ConfigError(f"--scorer: two scorers give {doubled[0]}; ask one at a time")
        return cls(client, scorers, timeout_s)

    async def score(self, rows: Sequence[Row], responses: Sequence[str]) -> list[Verdict]:
        """A verdict for each row with its response, by all scorers at the same time.

        A row that the service refuses, such as one that is too long, has the outcome `failed`.

        Raises:
            ExceptionGroup: of ServiceErrors. The service does not answer; InvalidReply: a scorer is another one than
                at the start.
        """
        verdicts = [Verdict() for _ in rows]
        async with asyncio.TaskGroup() as group:
            for name in self.scorers:
                group.create_task(self._by(name, rows, responses, verdicts))
        return verdicts

    async def _by(self, name: str, rows: Sequence[Row], responses: Sequence[str], verdicts: list[Verdict]) -> None:
        scorer = self.scorers[name]
        # Text and messages are two kinds of calls.
        for kind in (False, True):
            indices = [index for index, row in enumerate(rows) if bool(row.messages) is kind]
            for index, scored in await self._asked(name, rows, responses, indices) if indices else ():
                verdict = verdicts[index]
                if isinstance(scored, Unscored):
                    verdict.scores |= dict.fromkeys(scorer.measures)
                    verdict.outcomes[name], verdict.reasons[name] = _word(scored.outcome), scored.reason
                else:
                    verdict.scores |= scored
                    verdict.outcomes[name] = _word(Outcome.SCORED)

    async def _asked(
        self, name: str, rows: Sequence[Row], responses: Sequence[str], indices: Sequence[int]
    ) -> list[tuple[int, dict[str, float] | Unscored]]:
        """The scores, or the reason for none, that one scorer gives for the rows of these indices: all texts, or all
        messages."""
        try:
            scores = await self._call(
                name, [rows[index] for index in indices], [responses[index] for index in indices]
            )
        except (InvalidArgument, ResourceExhausted) as error:
            if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
                raise
            await self._check_there(name)
            if len(indices) == 1:
                return [(indices[0], Unscored(Outcome.FAILED, str(error)))]
        else:
            return [(index, self._read(name, scores, row)) for row, index in enumerate(indices)]
        # Finds the rows that are refused; the others are scored.
        middle = len(indices) // 2
        halves = [await self._asked(name, rows, responses, part) for part in (indices[:middle], indices[middle:])]
        return halves[0] + halves[1]

    async def _check_there(self, name: str) -> None:
        """InvalidReply if the service has lost the scorer, so that it refuses every row."""
        there = {each.name for each in await self._client.scorers(self._timeout_s)}
        asked = self.scorers[name].asked
        if asked not in there and not (not asked and len(there) == 1):
            names = ", ".join(sorted(there)) or "one without a name"
            raise InvalidReply(f"scorer {name}: was there at the start and is not now; there is {names}")

    async def _call(self, name: str, rows: Sequence[Row], responses: Sequence[str]) -> Scores:
        client = self._client.named(self.scorers[name].asked)
        labels, ended = [row.label for row in rows], [row.values.get("ended") is not False for row in rows]
        known: dict[str, Any] = {
            "labels": labels if any(labels) else (),
            "ended": () if all(ended) else ended,
            "columns": [row.columns for row in rows],
            "groups": [int.from_bytes(row.key[:8], signed=True) for row in rows],
            "timeout_s": self._timeout_s,
        }
        if rows[0].messages:
            asked = [row.conversation(response) for row, response in zip(rows, responses, strict=True)]
            return await client.score_conversations(asked, **known)
        return await client.score_texts([row.prompt for row in rows], responses, **known)

    def _read(self, name: str, scores: Scores, row: int) -> dict[str, float] | Unscored:
        scorer = self.scorers[name]
        if (scores.scorer, scores.model_hash) != (scorer.name, scorer.hash):
            raise InvalidReply(
                f"scorer {name}: was {scorer.name} {scorer.hash[:12]} at the start and is {scores.scorer} "
                f"{scores.model_hash[:12]} now; its scores cannot be compared"
            )
        if row in scores.unscored:
            return scores.unscored[row]
        numbers = [float(column[row]) for column in scores.columns.values()]
        if len(numbers) != len(scorer.measures) or not all(map(math.isfinite, numbers)):
            raise InvalidReply(f"scorer {name}: gave {numbers} for {', '.join(scorer.measures)}")
        return dict(zip(scorer.measures, numbers, strict=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def _word(outcome: Outcome) -> str:
    return outcome.name.lower()
