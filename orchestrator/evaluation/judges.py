"""Judges: functions of the user's that score an evaluation's samples, and that training never sees."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quartet.config.base import ConfigError
from quartet.threads import in_thread
from quartet.wire.pairs import Pair

Judge = Callable[[Sequence[Pair]], Sequence[float]]


async def verdicts(judges: Mapping[str, Judge], pairs: Sequence[Pair], limit_s: float) -> dict[str, list[float]]:
    """The numbers that each judge gives for the pairs, by the judge's name. Judges run one after the other, each in a
    thread, so that the event loop goes on renewing leases and reading responses.

    Args:
        judges: the judges by name.
        pairs: the samples to be judged.
        limit_s: longest time in seconds for each judge.

    Raises:
        ConfigError: a judge took longer, or gave something other than one finite number per pair.
    """
    return {name: await _in_time(name, judge, pairs, limit_s) for name, judge in judges.items()}


async def _in_time(name: str, judge: Judge, pairs: Sequence[Pair], limit_s: float) -> list[float]:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await in_thread(lambda: _checked(name, judge(pairs), len(pairs)), f"judge {name}")
    except TimeoutError:
        if not limit.expired():  # the judge's own
            raise
        raise ConfigError(
            f"evaluation.judges.{name}: gave no verdict on {len(pairs)} pairs within evaluation.judge_s "
            f"({limit_s:g} s); make it faster, or raise that limit"
        ) from None


def _checked(name: str, given: Sequence[float], count: int) -> list[float]:
    """The numbers as a list. ConfigError unless there is one finite number for each of `count` pairs."""
    values = [float(value) for value in given]
    if len(values) != count or not np.isfinite(values).all():
        raise ConfigError(
            f"evaluation.judges.{name}: should give one finite number per pair, "
            f"got {len(values)} of which {int(np.isfinite(values).sum())} finite for {count} pairs"
        )
    return values
