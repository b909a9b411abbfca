"""The policy learner's log-probs of samples, computed as they are finished while others are still sampled."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from quartet.wire.codec import Floats, Ints
from quartet.wire.ragged import Ragged


class LogprobSource(Protocol):
    """The method of the policy learner that is used here."""

    async def logprobs(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """Log-probs under the current weights; [T] for each pair."""


class EarlyLogprobs:
    """Gives finished samples their old log-probs in the time in which the learner would wait for the last of them.

    One call of the learner at a time, each for all samples that have come by then: if a call takes a second and a
    sample comes every tenth of one, a call is for ten. Only for a policy whose weights do not change meanwhile, which
    is lock-step.
    """

    def __init__(self, policy: LogprobSource) -> None:
        self._policy = policy
        self._turn = asyncio.Lock()
        self._waiting: list[_Asked] = []

    async def __call__(self, prompts: Ragged, responses: Ragged) -> list[Floats]:
        """Log-probs of the responses, [T] each. Errors as of the policy learner."""
        asked = _Asked(prompts, responses)
        self._waiting.append(asked)
        try:
            async with self._turn:
                if asked.rows is None:
                    await self._answer([each for each in self._waiting if each.rows is None])
        finally:
            self._waiting.remove(asked)
        assert asked.rows is not None
        return asked.rows

    async def _answer(self, together: "list[_Asked]") -> None:
        """Asks the learner for all of these in one call. If it fails, they still wait, and the next of them calls
        again. Nothing is done with the answer of one that was cancelled meanwhile."""
        rows = await self._policy.logprobs(
            Ragged.of([row for asked in together for row in asked.prompts]),
            Ragged.of([row for asked in together for row in asked.responses]),
        )
        for asked in together:
            count = len(asked.responses)
            asked.rows, rows = rows[:count], rows[count:]


class _Asked:
    """Pairs that wait for their log-probs."""

    def __init__(self, prompts: Ragged, responses: Ragged) -> None:
        self.prompts, self.responses = prompts, responses
        self.rows: list[Floats] | None = None
