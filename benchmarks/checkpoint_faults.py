"""A kill or a full disk at random points of a checkpoint: how many leave one that both learners are restored from.

    python -m benchmarks.checkpoint_faults [--trials 200] [--seed 0]

A run has the checkpoint of step 1 and writes that of step 2, keeping one. Its process is killed (SIGKILL) at a
random event of the file system or at a random moment of the writing, or finds the disk full at a random event or at a
random byte: of a disk that is as small as that (root makes one), else of a file.
Then the newest checkpoint is restored into new learners, bit for bit, and a next one is taken.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.checkpoint_faults import KINDS, Outcome, Scene
from tests.models import make_policy, make_reward


def main(trials: Annotated[int, typer.Option(min=4)] = 200, seed: int = 0) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = make_policy(folder / "policy", kind="llama", tied=False)
        scene = Scene(folder, policy, make_reward(folder / "reward"), seed)
        outcomes = [scene.trial(number, KINDS[number % len(KINDS)]) for number in range(trials)]
    Console().print(_table(outcomes))
    lost = sum(not outcome.whole for outcome in outcomes)
    print(f"{trials - lost} of {trials} restorable")
    raise typer.Exit(code=1 if lost else 0)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("fault", "trials", "killed", "told", "old one left", "new one there", "restorable")
    for kind in KINDS:
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        steps = Counter(outcome.step for outcome in of_kind)
        counts = (
            len(of_kind),
            sum(outcome.died for outcome in of_kind),
            sum(outcome.noted for outcome in of_kind),
            steps[1],
            steps[2],
            sum(outcome.whole for outcome in of_kind),
        )
        table.add_row(kind, *map(str, counts))
    return table


if __name__ == "__main__":
    typer.run(main)
