"""The scores of a scorer of another reward service, asked over gRPC or over HTTP."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from quartet.security.credentials import connect
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ServiceError, leaves
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import LEAST_S, SCORE, Pair
from services.reward.client import RewardClient

INFO_S = 60.0
"""Longest wait for the description of the scorer as this one starts."""


class Identity(NamedTuple):
    """The identity of the scorer."""

    name: str
    hash: str
    names: tuple[str, ...]
    """Names of its scores; empty if it gives one."""


class RemoteScores(NamedTuple):
    """The results of all pairs of a call."""

    hash: str
    """The hash of the scorer that gave them."""
    results: Sequence[Mapping[str, float] | Unscored]


class Service(Protocol):
    """The service there."""

    async def identity(self) -> Identity:
        """Asks who the scorer is. ServiceError if it does not say."""

    async def scored(self, pairs: Sequence[Pair], seconds: float) -> RemoteScores:
        """The results of all pairs within so many seconds, of which each pair may take most. The pairs are of one
        form: all have messages or none has, and all have a group or none has.

        Raises:
            InvalidArgument: some pair is refused.
            ServiceError: no answer came, or something else than an answer.
        """


class OverGrpc:
    """A service that is asked over gRPC."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._client: RewardClient | None = None

    def _opened(self) -> RewardClient:
        channel = connect(self._options["target"])
        return RewardClient(channel, self._options["application"]).named(self._options["scorer"])

    async def identity(self) -> Identity:
        """Asks who the scorer is."""
        async with self._opened() as client:
            identity = (await client.info(INFO_S)).identity
        return Identity(identity.name, identity.model_hash, tuple(identity.names))

    async def scored(self, pairs: Sequence[Pair], seconds: float) -> RemoteScores:
        """The results of all pairs."""
        if self._client is None:
            self._client = self._opened()
        known: dict[str, Any] = {"timeout_s": seconds, "pair_timeout_s": max(0.8 * seconds, LEAST_S)}
        known["labels"] = [pair.label for pair in pairs] if any(pair.label for pair in pairs) else []
        known["columns"] = [pair.columns for pair in pairs] if any(pair.columns for pair in pairs) else []
        known["ended"] = [] if all(pair.ended for pair in pairs) else [pair.ended for pair in pairs]
        known["groups"] = [pair.group for pair in pairs if pair.group is not None]
        if pairs[0].messages:
            scores = await self._client.score_conversations([pair.messages for pair in pairs], **known)
        else:
            prompts, responses = [pair.prompt for pair in pairs], [pair.response for pair in pairs]
            scores = await self._client.score_texts(prompts, responses, **known)
        rows = [{name: float(column[row]) for name, column in scores.columns.items()} for row in range(len(pairs))]
        return RemoteScores(scores.model_hash, [scores.unscored.get(row) or each for row, each in enumerate(rows)])


class Remote:
    """The scorer of another service: the scorer's function, which is called for all pairs of a batch."""

    takes_all = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Asks the service who the scorer is. ServiceError if it does not answer, ValueError if it gives scores of
        other names."""
        self._options = options
        self._service = _service(options)
        name, self._hash, names = asyncio.run(self._service.identity())
        self.source = f"{name} {self._hash}"
        """The text that identifies the scorer, whatever its address is."""
        if names != tuple(options["names"]):
            raise ValueError(f"the scorer gives scores of the names [{', '.join(names)}]; set names to these")

    async def __call__(self, pairs: Sequence[Pair]) -> list[Any]:
        """The scores or outcomes of all pairs.

        Pairs of several calls come together. Those that differ in form or in the time that their callers give them
        are asked for separately, so that the result of none depends on the others.
        """
        rows = dict[tuple[bool, bool, float | None], dict[int, Pair]]()
        for row, pair in enumerate(pairs):
            rows.setdefault((bool(pair.messages), pair.group is not None, pair.timeout_s), {})[row] = pair
        try:
            async with asyncio.TaskGroup() as group:
                asked = {
                    tuple(some): group.create_task(self._of_one_form([*some.values()], timeout_s))
                    for (_, _, timeout_s), some in rows.items()
                }
        except ExceptionGroup as several:
            raise leaves(several)[0] from None
        found = {row: result for some, task in asked.items() for row, result in zip(some, task.result(), strict=True)}
        return [found[row] for row in range(len(pairs))]

    async def _of_one_form(self, pairs: Sequence[Pair], timeout_s: float | None) -> list[Any]:
        limit = float(self._options["pair_timeout_s"])
        try:
            answer = await self._service.scored(pairs, 0.9 * min(limit, timeout_s or limit))
        except ServiceError as error:
            if isinstance(error, InvalidArgument) or (
                isinstance(error, ResourceExhausted) and error.retry_after_s is None
            ):
                raise  # of some pair, which is looked for
            outcome = Outcome.TIMEOUT if isinstance(error, DeadlineExceeded) else Outcome.FAILED
            where = self._options["url"] or self._options["target"]
            return [Unscored(outcome, f"{where}: {type(error).__name__}")] * len(pairs)
        if answer.hash != self._hash:
            reason = "the scorer has become another one; start this service again"
            return [Unscored(Outcome.FAILED, reason)] * len(pairs)
        return [self._given(each) for each in answer.results]

    def _given(self, result: Mapping[str, float] | Unscored) -> Any:
        if isinstance(result, Unscored):
            return result
        if {*result} != {*(self._options["names"] or [SCORE])}:
            return Unscored(Outcome.FAILED, "the scorer gave scores of other names than before")
        return result if self._options["names"] else result[SCORE]


def _service(options: Mapping[str, Any]) -> Service:
    if not options["url"]:
        return OverGrpc(options)
    from services.reward.scorers.kinds.remote_http import OverHttp

    return OverHttp(options)


make = Remote
"""Makes the scorer's function."""
