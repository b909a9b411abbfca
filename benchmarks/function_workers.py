"""The price of a function scorer's worker processes: cheap functions, and calls of which some hang, leak or exit.

python -m benchmarks.function_workers [--seconds 10] [--rounds 8]

Calls of 8 pairs, each a batch, from 16 callers. The cheap function counts words; the one that works takes 10 ms of
processor time for each pair, as a verifier may, and pairs that hang are given up after a second. In one of a hundred
calls a pair is drawn that is not counted: without faults it is as all others, with faults it hangs, leaks or exits.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import psutil
import typer

from benchmarks.emulated.functions import FAULTS, count
from quartet.serving.batcher import Batcher
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.outcomes import Unscored
from quartet.wire.pairs import Pair
from services.reward.kinds import FunctionScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.scorer import EncodedPair, Result, results

PAIRS, CALLERS = 8, 16
FAULTY = 0.01
TIMEOUT_S = 1.0
NO_IDS = np.zeros(1, np.int32)
TEXT = "word " * 100


@dataclass
class Call:
    """A call of PAIRS pairs, the last of them with a label."""

    label: str = ""
    results: list[Result] = field(default_factory=list)
    costs: np.ndarray = field(default_factory=lambda: np.full(PAIRS, 100, np.int32))

    def items(self, rows: Sequence[int]) -> list[EncodedPair]:
        """The pairs."""
        return [EncodedPair(NO_IDS, NO_IDS, Pair("", TEXT, self.label if row == PAIRS - 1 else "")) for row in rows]

    def put(self, rows: Sequence[int], results: Sequence[Result]) -> None:
        """Keeps the results."""
        self.results += results


def workers(function: str) -> Batcher[EncodedPair, Result]:
    """A batcher over a scorer of this module, as a replica has it."""
    config = FunctionScorerConfig(
        kind="function",
        function=f"benchmarks.emulated.functions:{function}",
        pair_timeout_s=TIMEOUT_S,
        workers=6,
        memory_gib=1.0,
        batch_tokens=PAIRS * 100,
    )
    made = FunctionScorer(config)
    return Batcher(
        made.score,
        batch_tokens=made.batch_tokens,
        batch_s=20,
        passes=made.passes,
        patience_s=made.patience_s,
    )


def in_process() -> Batcher[EncodedPair, Result]:
    """The same with the cheap function in this process."""

    def score(pairs: Sequence[EncodedPair]) -> list[Result]:
        return results(np.asarray(count([each.pair for each in pairs]), np.float32)[:, None], "count")

    return Batcher(score, batch_tokens=PAIRS * 100, batch_s=20)


def processor_s() -> float:
    """The processor time of this process and of all that it started, in seconds."""
    own = psutil.Process()
    each = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(times.user + times.system + times.children_user + times.children_system for times in each)


async def measure(
    batcher: Batcher[EncodedPair, Result], seconds: float, *, faults: bool = False
) -> tuple[float, float]:
    """Pairs that are scored per second, and the processor time of each in milliseconds. Pairs that are drawn to have
    a fault are not counted."""
    random = np.random.default_rng(0)
    good, share = 0, Share("run", Purpose.TRAINING)
    began, spent = time.monotonic(), processor_s()

    async def caller() -> None:
        nonlocal good
        while time.monotonic() < began + seconds:
            drawn = random.random() < FAULTY
            call = Call(str(random.choice(FAULTS)) if drawn and faults else "")
            await batcher.submit(share, call)
            unscored = sum(isinstance(each, Unscored) for each in call.results)
            assert unscored <= bool(call.label), "a pair paid for another"
            good += PAIRS - drawn

    # The callers of hung pairs wait, and others come in their place.
    waiting = {asyncio.create_task(caller()) for _ in range(CALLERS)}
    await asyncio.sleep(seconds)
    counted = good
    await asyncio.gather(*waiting)
    return counted / seconds, 1000 * (processor_s() - spent) / good


async def measured(seconds: float, rounds: int) -> None:
    """Measures in turns, and prints medians."""
    here, apart, working = in_process(), workers("count"), workers("works")
    for each in (here, apart, working):  # starts the workers
        await measure(each, min(seconds, 2))
    cheap, ratios = [], []
    for number in range(rounds):
        cheap.append([(await measure(each, seconds / 4))[0] for each in (here, apart)])
        taken = {
            faults: await measure(working, seconds, faults=faults) for faults in (number % 2 == 0, number % 2 > 0)
        }
        if not taken[False][0]:
            raise RuntimeError(f"no pair was scored within {seconds:g} s; --seconds should be more on this machine")
        ratios.append([after / before for before, after in zip(taken[False], taken[True], strict=True)])
    inside, outside = np.median(cheap, axis=0)
    print(f"a cheap function: {inside:,.0f} pairs/s in process, {outside:,.0f} in worker processes")
    for what, values in zip(("throughput", "processor time of a pair"), np.transpose(ratios), strict=True):
        print(f"{what} beside 1 % of calls with a fault: {np.median(values):.3f} of that without; {np.sort(values)}")


def main(
    seconds: Annotated[float, typer.Option(min=1, help="time of each measurement")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each side")] = 8,
) -> None:
    """Measures and prints."""
    asyncio.run(measured(seconds, rounds))


if __name__ == "__main__":
    typer.run(main)
