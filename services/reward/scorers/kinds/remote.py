"""The scores of a scorer of another reward service, asked over gRPC."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from quartet.security.credentials import connect
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, ServiceError
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair
from services.reward.client import RewardClient, Scores

_INFO_S = 60.0
"""Longest wait for the description of the scorer as this one starts."""


class Remote:
    """The scorer of another service."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Asks the service who the scorer is. ServiceError if it does not answer, ValueError if it gives scores of
        other names."""
        self._options = options
        self._client: RewardClient | None = None
        info = asyncio.run(self._info())
        self._hash = info.identity.model_hash
        self.source = f"{info.identity.name} {self._hash}"
        """The text that identifies the scorer, whatever its address is."""
        if (names := tuple(info.identity.names)) != tuple(options["names"]):
            raise ValueError(f"the scorer gives scores of the names [{', '.join(names)}]; set names to these")

    async def _info(self) -> Any:
        async with self._opened() as client:
            return await client.info(_INFO_S)

    def _opened(self) -> RewardClient:
        channel = connect(self._options["target"])
        return RewardClient(channel, self._options["application"]).named(self._options["scorer"])

    async def scored(self, pairs: Sequence[Pair]) -> list[Any]:
        """The scores or outcomes of all pairs."""
        if self._client is None:
            self._client = self._opened()
        try:
            scores = await self._asked(self._client, pairs)
        except InvalidArgument:
            raise  # of some pair, which is looked for
        except ServiceError as error:
            outcome = Outcome.TIMEOUT if isinstance(error, DeadlineExceeded) else Outcome.FAILED
            return [Unscored(outcome, f"{self._options['target']}: {type(error).__name__}")] * len(pairs)
        if scores.model_hash != self._hash:
            return [Unscored(Outcome.FAILED, "the scorer has become another one; start this service again")] * len(
                pairs
            )
        return [scores.unscored.get(row) or self._one(scores, row) for row in range(len(pairs))]

    def _one(self, scores: Scores, row: int) -> Any:
        values = {name: float(column[row]) for name, column in scores.columns.items()}
        return values if self._options["names"] else next(iter(values.values()))

    async def _asked(self, client: RewardClient, pairs: Sequence[Pair]) -> Scores:
        limit = 0.9 * float(self._options["pair_timeout_s"])
        known: dict[str, Any] = {"timeout_s": limit, "pair_timeout_s": 0.8 * limit}
        known["labels"] = [pair.label for pair in pairs] if any(pair.label for pair in pairs) else []
        known["columns"] = [pair.columns for pair in pairs] if any(pair.columns for pair in pairs) else []
        groups = [pair.group for pair in pairs]
        known["groups"] = groups if None not in groups else []
        if all(pair.messages for pair in pairs):
            return await client.score_conversations([pair.messages for pair in pairs], **known)
        return await client.score_texts([pair.prompt for pair in pairs], [pair.response for pair in pairs], **known)


def make(options: Mapping[str, Any]) -> Callable[[Sequence[Pair]], Coroutine[Any, Any, list[Any]]]:
    """The scorer's function, which is called for all pairs of a batch."""
    remote = Remote(options)

    async def asked(pairs: Sequence[Pair]) -> list[Any]:
        return await remote.scored(pairs)

    asked.takes_all = True  # type: ignore[attr-defined]
    asked.source = remote.source  # type: ignore[attr-defined]
    return asked
