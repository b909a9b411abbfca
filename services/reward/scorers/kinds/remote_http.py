"""A reward service that is asked over HTTP, in Quartet's own JSON (docs/reward-http.md)."""

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from quartet.wire.backoff import Deadline
from quartet.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    InvalidReply,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from quartet.wire.outcomes import Unscored
from quartet.wire.pairs import LEAST_S, SCORE, Pair
from quartet.wire.splitting import in_parts
from services.reward.http_fields import OUTCOMES, ModelList, Result, RewardsAnswer
from services.reward.scorers.kinds.exchange import BUSY, Exchanged, TooLongError, client, exchange
from services.reward.scorers.kinds.remote import INFO_S, Identity, RemoteScores

_MOST_BYTES = 1 << 20
_MOST_PAIR_BYTES = 1 << 14
"""Most bytes of an answer, and for each pair more."""
_MOST_REASON = 500
_BUSY = BUSY - {409}  # which a service gives whose function is defective
_KINDS = {outcome_name: outcome for outcome, outcome_name in OUTCOMES.items()}
Answer = TypeVar("Answer", bound=BaseModel)


class OverHttp:
    """A service that is asked over HTTP."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._url = options["url"].rstrip("/")
        self._client: httpx.AsyncClient | None = None
        # Workers are forked of the process that makes this object, so that all of them send the same.
        self._groups_of = secrets.token_hex(16)

    def _opened(self) -> httpx.AsyncClient:
        variable = self._options["api_key"]
        return client(self._url, os.environ[variable] if variable else "")

    async def identity(self) -> Identity:
        """Asks who the scorer is."""
        async with self._opened() as asked:
            answer = await self._answered(asked, "GET", "/v1/models", None, Deadline(INFO_S), _MOST_BYTES)
        cards = {card.id: card for card in _read(ModelList, answer).data}
        name = self._options["scorer"] or (next(iter(cards)) if len(cards) == 1 else "")
        if name not in cards:
            raise InvalidArgument(f"scorer: {name!r} is none of those there are: {', '.join(sorted(cards))}")
        card = cards[name]
        if not card.model_hash:
            raise Unavailable(f"scorer {name} has not started yet")
        return Identity(card.scorer, card.model_hash, () if card.scores == [SCORE] else tuple(card.scores))

    async def scored(self, pairs: Sequence[Pair], seconds: float) -> RemoteScores:
        """The results of all pairs."""
        if self._client is None:
            self._client = self._opened()
        asked, deadline = self._client, Deadline(seconds)
        rows = [*map(_pair, pairs)]
        # A prompt's responses may come in several calls, and one call's pairs go in several requests.
        grouped = {} if pairs[0].group is None else {"groups_of": self._groups_of}

        async def part(some: range) -> RemoteScores:
            body = {
                "scorer": self._options["scorer"],
                "pairs": rows[some.start : some.stop],
                "pair_timeout_s": max(0.8 * seconds, LEAST_S),
                **grouped,
            }
            most = _MOST_BYTES + len(some) * _MOST_PAIR_BYTES
            answer = _read(RewardsAnswer, await self._answered(asked, "POST", "/v1/rewards", body, deadline, most))
            if len(answer.results) != len(some):
                raise InvalidReply(f"{len(answer.results)} results for {len(some)} pairs")
            return RemoteScores(answer.scorer.model_hash, [*map(_result, answer.results)])

        # A token has three bytes or more.
        parts = await in_parts([len(json.dumps(row)) // 3 for row in rows], part)
        if len({each.hash for each in parts}) > 1:
            raise InvalidReply("parts of one call were scored by several scorers")
        return RemoteScores(parts[0].hash, [*chain.from_iterable(each.results for each in parts)])

    async def _answered(
        self,
        asked: httpx.AsyncClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        deadline: Deadline,
        most: int,
    ) -> bytes:
        """The body of an answer that is one."""
        try:
            answer = await exchange(asked, method, self._url + path, body, deadline, most, busy=_BUSY)
        except httpx.TimeoutException:
            raise DeadlineExceeded("no answer in time") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"cannot be reached: {type(error).__name__}") from None
        except TooLongError as error:
            raise InvalidReply(f"the answer {error}") from None
        if answer.status != 200:
            raise _refusal(answer)
        return answer.content


def _refusal(answer: Exchanged) -> ServiceError:
    """The error of a status, without the words of the other end."""
    said = f"status {answer.status}"
    match answer.status:
        case 400 | 422:
            return InvalidArgument(said)
        case 413:
            return ResourceExhausted(said)
        case 401 | 403:
            return Unauthenticated(said)
        case 404:
            return NotFound(said)
        case 409:
            return FailedPrecondition(said)
    return Unavailable(said) if answer.status in _BUSY else InvalidReply(said)


def _pair(pair: Pair) -> dict[str, Any]:
    """A pair as a request has it: as messages or as texts, with its group or without."""
    known: dict[str, Any] = {"prompt": pair.prompt, "response": pair.response}
    if pair.messages:
        known = {"prompt": [dict(each) for each in pair.messages[:-1]], "response": pair.messages[-1]["content"]}
    known |= {"label": pair.label} if pair.label else {}
    known |= {"columns": dict(pair.columns)} if pair.columns else {}
    known |= {} if pair.group is None else {"group": pair.group}
    return known | ({} if pair.ended else {"ended": False})


def _read(kind: type[Answer], content: bytes) -> Answer:
    """An answer of this kind. InvalidReply if it is none."""
    try:
        return kind.model_validate_json(content, strict=True)
    except (ValidationError, RecursionError):
        raise InvalidReply("the answer is not one of the protocol") from None


def _result(result: Result) -> Mapping[str, float] | Unscored:
    """The scores, or the outcome. InvalidReply for a number without an outcome that allows it, and the reverse."""
    scores = result.scores
    if result.outcome == "scored":
        if not scores or not all(map(math.isfinite, scores.values())):
            raise InvalidReply("a pair that is scored has no finite scores")
        return scores
    if scores is not None:
        raise InvalidReply("a pair that is not scored has scores")
    return Unscored(_KINDS[result.outcome], (result.reason or "")[:_MOST_REASON])
