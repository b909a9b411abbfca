"""Learning from samples that are s versions old, with each correction and without, beside learning at lock-step.

    python -m benchmarks.lag [--seeds 0,1,2,3,4] [--lag 8] [--learning-rate 3e-3] [--steps 80]
        [--corrections none,tis,tis-sequence,icepop,geometric,decoupled,dis] [--folder runs/lag] [--plot FILE]

One process and a synthetic task, in which a correction can matter: a response scores 1 if it has the wanted number of
tokens, and less for each token more or less. A policy whose responses are too long learns to end them. If it still
learns that from old samples when they have already become too short, it goes too far, and then too far back. The
policy's and the critic's trainers, the loss, the corrections and the estimates of advantages are the project's own; a
small Llama with random weights samples in this process. The learning rate is high: within s versions the policy moves
a long way.

Batch t is sampled by version t - s, and by version 0 as long as t is less than s, so that every sample is as old as a
bound of s allows. `none` gives every token a weight of 1. Lock-step (s = 0) has nothing to correct. A finished run is
added to results.jsonl in the folder; a later call goes on with those that are missing. Prints the mean score of the
batches in the second half of a run, over seeds, with its standard error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.lag.drawing import draw
from benchmarks.lag.run import NONE, Setting, train

ALL = "none,tis,tis-sequence,icepop,geometric,decoupled,dis"
Results = dict[Setting, dict[int, list[float]]]
"""Setting -> seed -> mean score of each batch."""
console = Console()


def main(
    seeds: str = "0,1,2,3,4",
    lag: Annotated[int, typer.Option(min=0)] = 8,
    corrections: str = ALL,
    learning_rate: float = 3e-3,
    steps: Annotated[int, typer.Option(min=2)] = 80,
    folder: Path = Path("runs/lag"),
    plot: Annotated[Path | None, typer.Option(help="File to draw to, .svg or .png.")] = None,
) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    wanted = [int(seed) for seed in seeds.split(",")]
    arms = [(NONE, 0), *((correction, lag) for correction in corrections.split(","))]
    settings = [Setting(correction, age, learning_rate, steps) for correction, age in arms]
    file = folder / "results.jsonl"
    results = read(file)
    for seed in wanted:
        for setting in settings:
            if seed not in results.setdefault(setting, {}):
                results[setting][seed] = train(setting, seed)
                add(file, setting, seed, results[setting][seed])
                console.print(f"seed {seed}, {setting}: {second_half(results[setting][seed]):+.3f}")
    finished = {setting: [results[setting][seed] for seed in wanted] for setting in settings}
    console.print(table(finished))
    if plot:
        draw(finished, plot)


def read(file: Path) -> Results:
    """The runs that are finished."""
    results: Results = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        run = json.loads(line)
        results.setdefault(Setting(**run["setting"]), {})[run["seed"]] = run["scores"]
    return results


def add(file: Path, setting: Setting, seed: int, scores: Sequence[float]) -> None:
    """Appends a finished run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps({"setting": asdict(setting), "seed": seed, "scores": list(scores)}) + "\n")


def second_half(scores: Sequence[float]) -> float:
    """Mean over the second half of the batches."""
    return fmean(scores[len(scores) // 2 :])


def table(results: Mapping[Setting, Sequence[Sequence[float]]]) -> Table:
    """A row for each setting."""
    rows = Table("setting", "second half, each seed", "mean", "SE", "worst batch in it")
    for setting, curves in results.items():
        ends = [second_half(curve) for curve in curves]
        error = stdev(ends) / sqrt(len(ends)) if len(ends) > 1 else nan
        worst = min(min(curve[len(curve) // 2 :]) for curve in curves)
        each = " ".join(f"{end:+.3f}" for end in ends)
        rows.add_row(str(setting), each, f"{fmean(ends):+.3f}", f"{error:.3f}", f"{worst:+.2f}")
    return rows


if __name__ == "__main__":
    typer.run(main)
