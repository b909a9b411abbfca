"""A step at lock-step divided by its critical path, and a step with sampling ahead divided by its slowest stage.

    python -m benchmarks.pipeline [--case reward-bound] [--seconds 5] [--rounds 2] [--steps 4]

Real Serve, proxy, gRPC, replicas, clients and loop; the models and the push sleep (benchmarks/emulated). So the rest
of a step is what the loop, the calls and needless waits cost. In the proportions of each of `CASES`, with a critical
path of `--seconds`, runs with loop.max_staleness 0 and 1 take turns. The first two steps of a run, in which the
pipeline fills, are left out. Prints means over all other steps, and how busy the machine's cores were meanwhile, by
whatever.

The critical path is that of Pace.critical_path, the slowest stage that of Pace.stages. Goals: at most 1.05 and 1.10.
With max_staleness 1 a sample is trained on within two steps, so that a step takes at least half of its critical path
too; in these cases the slowest stage takes longer than that.
"""

import asyncio
from statistics import mean
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import check_known
from benchmarks.emulated.pace import CASES, Pace
from benchmarks.emulated.quartet import Quartet, quartet
from benchmarks.emulated.run import Line, Run
from benchmarks.ended import heed_sigterm
from orchestrator.clients import Services

WARM_UP = 2
MOST = {0: 1.05, 1: 1.10}
"""Largest ratio that is wanted, by max_staleness."""
console = Console(width=120)


def main(
    case: list[str] | None = None,
    seconds: Annotated[float, typer.Option(min=0.5)] = 5.0,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Runs the benchmark and prints its results."""
    check_known(case or (), CASES, "--case")
    heed_sigterm()
    chosen = {name: CASES[name].times(seconds) for name in case or CASES}
    with quartet(next(iter(chosen.values()))) as services:
        console.print(asyncio.run(_measured(services, chosen, rounds, steps)))


async def _measured(services: Quartet, cases: dict[str, Pace], rounds: int, steps: int) -> Table:
    table = Table("case", "s = 0 / critical path", "s = 1 / slowest stage", "s = 1 / s = 0", "ideal", "cores busy")
    for name, pace in cases.items():
        services.set(pace)
        taken: dict[int, list[Line]] = {0: [], 1: []}
        psutil.cpu_percent()
        for _ in range(rounds):
            for staleness, lines in taken.items():
                lines += await _steps(services, pace, staleness, steps)
        busy = psutil.cpu_percent()
        wall = {staleness: mean(line["seconds/wall"] for line in lines) for staleness, lines in taken.items()}
        table.add_row(name, *ratios(pace, wall), f"{busy:.0f} %")
        for staleness, lines in taken.items():
            console.print(f"{name}, s = {staleness}: {_described(lines)}")
    return table


def ratios(pace: Pace, wall: dict[int, float]) -> list[str]:
    """The two ratios, marked if they are larger than wanted, the gain, and the gain if both ratios were 1.

    `wall` has the seconds of a step by max_staleness.
    """
    measured = {0: wall[0] / pace.critical_path, 1: wall[1] / pace.slowest_stage}
    marked = [f"{ratio:.3f}{'' if ratio <= MOST[staleness] else ' !'}" for staleness, ratio in measured.items()]
    return [*marked, f"{wall[1] / wall[0]:.3f}", f"{pace.slowest_stage / pace.critical_path:.3f}"]


async def _steps(services: Quartet, pace: Pace, staleness: int, steps: int) -> list[Line]:
    clients = Services.connect(services.config)
    try:
        run = Run(services.config, clients, pace, staleness=staleness, steps=WARM_UP + steps)
        return (await run.finish())[WARM_UP:]
    finally:
        await clients.close()


def _described(lines: list[Line]) -> str:
    """Seconds of each step, and the loop's waits in the mean."""
    waits = {name: mean(line[name] for line in lines) for name in lines[0] if name.startswith("wait/loop/")}
    shares = ", ".join(f"{name.rpartition('/')[2]} {100 * share:.1f} %" for name, share in waits.items() if share)
    return f"{' '.join(format(line['seconds/wall'], '.2f') for line in lines)} s; loop: {shares}"


if __name__ == "__main__":
    typer.run(main)
