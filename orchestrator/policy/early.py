"""The policy learner's log-probs of samples, computed as they are finished while others are still sampled."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from quartet.columns import Columns
from quartet.wire.codec import Floats

LogprobsOf = Callable[[Columns], Awaitable[Floats]]
"""The policy learner's log-probs of trajectories under the current weights, [M]."""


class EarlyLogprobs:
    """Gives finished samples their old log-probs in the time in which the learner would wait for the last of them.

    One call of the learner at a time, each for all samples that have come by then: if a call takes a second and a
    sample comes every tenth of one, a call is for ten. Only for a policy whose weights do not change meanwhile, which
    is lock-step.
    """

    def __init__(self, logprobs_of: LogprobsOf) -> None:
        self._logprobs_of = logprobs_of
        self._turn = asyncio.Lock()
        self._waiting: list[_Asked] = []

    async def __call__(self, trajectories: Columns) -> Floats:
        """Log-probs of the sampled tokens, [M]. Errors as of the policy learner."""
        asked = _Asked(trajectories)
        self._waiting.append(asked)
        try:
            async with self._turn:
                if asked.logprobs is None:
                    # If it fails, they still wait, and the next of them calls again.
                    together = [each for each in self._waiting if each.logprobs is None]
                    parts = [each.trajectories for each in together]
                    logprobs = await self._logprobs_of(Columns.concatenate(parts))
                    ends = np.cumsum([part.size("sampled") for part in parts])
                    for each, its in zip(together, np.split(logprobs, ends[:-1]), strict=True):
                        each.logprobs = its  # with which nothing is done if it was cancelled meanwhile
        finally:
            self._waiting.remove(asked)
        assert asked.logprobs is not None
        return asked.logprobs


class _Asked:
    """Trajectories that wait for their log-probs."""

    def __init__(self, trajectories: Columns) -> None:
        self.trajectories = trajectories.select()
        self.logprobs: Floats | None = None
