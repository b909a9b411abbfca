"""The waits of the callers in benchmarks/reward."""

import time

import numpy as np

from benchmarks.reward import Caller, Row
from quartet.wire.errors import ResourceExhausted


async def test_a_callers_wait_begins_before_it_is_told_that_the_service_is_full() -> None:
    answers = [ResourceExhausted("full", 0.05), ResourceExhausted("full", 0.05)]

    async def ask(pairs: list[Row]) -> int:
        if answers:
            raise answers.pop()
        return len(pairs)

    row = np.zeros(1, np.int32), np.zeros(1, np.int32)
    caller = Caller(ask)  # type: ignore[arg-type]
    await caller.go_on(np.random.default_rng(0), [row], 3, time.perf_counter() + 0.01)
    assert (caller.pairs, len(caller.seconds)) == (3, 1)
    assert caller.seconds[0] >= 0.1
