"""The policy learner's log-probs of samples, computed as they are finished while others are still sampled."""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from quartet.columns import Columns
from quartet.wire.codec import Floats
from quartet.wire.together import Together


def early_logprobs(logprobs_of: Callable[[Columns], Awaitable[Floats]]) -> Together[Columns, Floats]:
    """Gives finished samples their old log-probs in the time in which the learner would wait for the last of them.

    One call of the learner at a time, each for all samples that have come by then: if a call takes a second and a
    sample comes every tenth of one, a call is for ten. Only for a policy whose weights do not change meanwhile, which
    is lock-step.

    `logprobs_of` gives the log-probs of the sampled tokens of trajectories under the current weights, [M]; its errors
    are those of all samples that the call was for.
    """

    async def of_each(trajectories: Sequence[Columns]) -> Sequence[Floats]:
        logprobs = await logprobs_of(Columns.concatenate([each.select() for each in trajectories]))
        ends = np.cumsum([each.size("sampled") for each in trajectories])
        return np.split(logprobs, ends[:-1])

    return Together(of_each)
