"""Samples per second of Quartet over TRL's, on the same models, prompts, batches, epochs and lengths, in turns.

    python -m benchmarks.vs_trl [--case demo] [--rounds 3] [--updates 5] [--at-rest] [--environment .quartet/trl]

TRL 1.12.0 is the last release with PPO; GRPO is raced against a newer one. Each is installed into a virtual
environment of its own at the first run: ENVIRONMENT, and ENVIRONMENT-grpo. The learning rates are so small that
lengths stay as they are. Quartet runs the file that `quartet init` writes for the models and this machine, nothing
tuned; with GRPO its section `algorithm` names that kind. While TRL has its turn all of Quartet's processes are
stopped by SIGSTOP, or with `--at-rest` only without work. The first update of every turn is left out.

Prints the ratio of the medians in each round; the share of Quartet's step that each stage takes; and the part of
each stage that its arithmetic would take, done as fast as these cores do one large matrix product in Quartet's dtype.
"""

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import check_known
from benchmarks.ended import heed_sigterm
from benchmarks.vs_trl.cases import CASES, Case
from benchmarks.vs_trl.floor import operations, rate
from benchmarks.vs_trl.sides import STAGES, Quartet, Trl, configured, make_environment

console = Console()


def main(
    case: Annotated[list[str], typer.Option(help=f"Any of {', '.join(CASES)}.")] = list(CASES),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    updates: Annotated[int, typer.Option(min=2)] = 5,
    at_rest: Annotated[bool, typer.Option("--at-rest", help="Stop no process during TRL's turn.")] = False,
    environment: Path = Path(".quartet/trl"),
) -> None:
    """Runs the benchmark and prints its results."""
    check_known(case, CASES, "--case")
    heed_sigterm()
    pythons = {
        algorithm: make_environment(environment.absolute().with_name(f"{environment.name}{suffix}"), algorithm)
        for algorithm, suffix in (("ppo", ""), ("grpo", "-grpo"))
        if any(CASES[name].algorithm == algorithm for name in case)
    }
    ratios = Table("case", "samples/s over TRL's", "each round")
    shares, floors = Table("share of the step", *STAGES), Table("arithmetic's part of it", *STAGES[:-1])
    for name in case:
        result = race(name, rounds, updates, at_rest, pythons[CASES[name].algorithm])
        each = ", ".join(f"{ratio:.2f}" for ratio in result.ratios)
        ratios.add_row(name, f"{median(result.ratios):.2f}", each)
        shares.add_row(name, *(f"{result.share(stage):.0%}" for stage in STAGES))
        # The log-probs of lock-step are taken while others are sampled, and leave next to nothing of their stage.
        parts = result.arithmetic(CASES[name]).items()
        floors.add_row(name, *(f"{part:.0%}" if result.share(stage) > 0.01 else "" for stage, part in parts))
    console.print(ratios, shares, floors)


@dataclass(frozen=True, slots=True)
class Result:
    """One case, raced."""

    ratios: list[float]
    """Samples per second over TRL's, for each round."""
    ours: list[dict[str, float]]
    """Seconds of the stages of Quartet's updates."""

    rates: list[float]
    """Floating-point operations per second of a matrix product, before each round."""

    def arithmetic(self, case: Case) -> dict[str, float]:
        """Part of each stage that its arithmetic would take at that rate."""
        floor = operations(case, median(update["length"] for update in self.ours))
        return {
            stage: count / median(self.rates) / median(update[stage] for update in self.ours)
            for stage, count in floor.items()
        }

    def share(self, stage: str) -> float:
        """Part of an update that a stage takes, in the median."""
        return median(update[stage] / update["step"] for update in self.ours)


def race(name: str, rounds: int, updates: int, at_rest: bool, python: Path) -> Result:
    """Both sides, one after the other, so many rounds."""
    result = Result([], [], [])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        CASES[name].make(folder)
        trl = Trl(python, folder, CASES[name], threads=len(os.sched_getaffinity(0)))
        quartet = Quartet(folder, configured(folder, CASES[name]))
        with quartet.served():
            for round_ in range(rounds):
                with nullcontext() if at_rest else quartet.stopped():
                    result.rates.append(rate(trl.threads, CASES[name].dtype))
                    theirs = trl.updates(updates)[1:]
                ours = quartet.updates(updates)[1:]
                result.ours.extend(ours)
                result.ratios.append(median(theirs) / median(update["step"] for update in ours))
                console.print(f"{name}, round {round_ + 1} of {rounds}: {result.ratios[-1]:.2f}")
    return result


if __name__ == "__main__":
    typer.run(main)
