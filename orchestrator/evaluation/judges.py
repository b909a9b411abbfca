"""Judges: functions of the user's that score an evaluation's samples, and that training never sees."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quartet.config.base import ConfigError
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
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[float]] = loop.create_future()

    def settle(given: list[float] | BaseException) -> None:
        if answer.done():
            return
        if isinstance(given, BaseException):
            answer.set_exception(given)
        else:
            answer.set_result(given)

    def run() -> None:
        try:
            given: list[float] | BaseException = _checked(name, judge(pairs), len(pairs))
        except Exception as error:
            given = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, given)

    # Not in a pool: the end of the program would wait for a judge that hangs.
    threading.Thread(target=run, name=f"judge {name}", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError:
        if answer.done() and not answer.cancelled():
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
