"""Random schedules of delays, failures and kills, and what they do to the samples of the streaming loop.

    python -m benchmarks.staleness [--schedules 1000] [--first 0]

Each schedule is a run of ten steps of the real loop, stream, slots and collector, in virtual time, with services that
keep the contracts of the real clients: each kind of call takes a random time with a long tail; replicas take new
versions one after the other, are lost, and go on with requests in flight; calls fail beyond their retries; the run is
killed at any moment and resumed from its last checkpoint and its journal. The number of the schedule is its seed.

Prints how many samples were trained on beyond the bound, discarded (complete after the last restart, and not trained
on), lost (their numbers never trained on) or trained on twice, and how many tasks were left behind at a kill, at a
failure or at the end; all of these must be 0. And beside each other, by the bound and the depth: the mean age of the
oldest tokens that admission lets one expect if sampling begins at once, and the measured one. `python -m tests.chaos`
does the like to real services.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.staleness.schedule import Outcome, run

console = Console()


def main(schedules: Annotated[int, typer.Option(min=1)] = 1000, first: int = 0) -> None:
    """Runs the benchmark and prints its results; exit code 1 if a sample went wrong."""
    outcomes = [run(seed) for seed in range(first, first + schedules)]
    console.print(_ages(outcomes))
    samples = sum(len(outcome.ages) for outcome in outcomes)
    console.print(f"{schedules} schedules, {samples} samples, {sum(o.restarts for o in outcomes)} restarts")
    for fault in ("over_bound", "discarded", "lost", "doubled", "tasks_left"):
        console.print(f"{fault}: {sum(getattr(outcome, fault) for outcome in outcomes)}")
    if wrong := [first + place for place, outcome in enumerate(outcomes) if outcome.faults]:
        console.print(f"schedules with faults: {wrong}")
        raise typer.Exit(1)


def _ages(outcomes: Sequence[Outcome]) -> Table:
    """The ages of tokens by the bound and the depth, beside what is expected."""
    table = Table("s", "depth", "schedules", "oldest token, expected", "measured", "all tokens, measured")
    groups: dict[tuple[int, int], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.staleness, outcome.depth].append(outcome)
    for (staleness, depth), group in sorted(groups.items()):
        low, high = (mean(each[side] for outcome in group for each in outcome.expected) for side in (0, 1))
        expected = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        oldest = mean(age for outcome in group for age in outcome.ages)
        tokens = mean(age for outcome in group for age in outcome.token_ages)
        table.add_row(str(staleness), str(depth), str(len(group)), expected, f"{oldest:.2f}", f"{tokens:.2f}")
    return table


if __name__ == "__main__":
    typer.run(main)
