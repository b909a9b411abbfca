"""A step whose responses are scored while they grow over one that scores whole responses, in turns.

    python -m benchmarks.kept_tokens [--case 20M-bf16] [--rounds 3] [--updates 5]

Both sides run the file that `quartet init` writes for the models of a case of `benchmarks.vs_trl`; the other has
`kept_tokens: 0`. The first update of every turn is left out. Prints the ratios of the medians: of the step, of its
sampling, and of what scoring takes after the last sample.
"""

import tempfile
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.vs_trl.cases import CASES
from benchmarks.vs_trl.sides import Quartet, configured

CONSOLE = Console()
SHOWN = ("step", "generate", "score")


def main(
    case: Annotated[str, typer.Option(help=f"{', '.join(CASES)}.")] = "20M-bf16",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    updates: Annotated[int, typer.Option(min=2)] = 5,
) -> None:
    """Runs both sides in turns."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        CASES[case].make(root)
        keeping = configured(root, CASES[case])
        for number in range(1, rounds + 1):
            with_it, without = turn(root, keeping, updates), turn(root, keeping_nothing(keeping), updates)
            ratios = ", ".join(f"{name} {with_it[name] / without[name]:.2f}" for name in SHOWN)
            CONSOLE.print(f"round {number}: {ratios}")


def keeping_nothing(raw: dict[str, Any]) -> dict[str, Any]:
    """The same file with `kept_tokens: 0`."""
    other = deepcopy(raw)
    _, reward, reference, _ = (application["args"] for application in other["applications"])
    reward["scorer"]["kept_tokens"] = reference["kept_tokens"] = 0
    return other


def turn(folder: Path, raw: dict[str, Any], updates: int) -> dict[str, float]:
    """Median seconds of a step and of its stages."""
    quartet = Quartet(folder, raw)
    quartet.up()
    try:
        steps = quartet.updates(updates)[1:]
    finally:
        quartet.down()
    return {name: median(step[name] for step in steps) for name in SHOWN}


if __name__ == "__main__":
    typer.run(main)
