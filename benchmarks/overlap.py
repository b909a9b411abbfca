"""Seconds per PPO step in lock-step and with sampling ahead, on the same services, taking turns.

    python -m recipes.reviews                       # once: the demo's models
    python -m benchmarks.overlap [--rounds 3] [--steps 8] [--staleness 0,1] [--pause 0] [--config deploy/ppo.yaml]
    python -m benchmarks.overlap --case 20M --rounds 2     # a case of benchmarks/vs_trl, instead of a file

`--pause 0.5` makes the reward a function that takes half a second per call, as a remote judge does: what lock-step
waits for, sampling ahead works through. Every round trains once at each staleness; the first two steps of a run have
nothing ahead of them yet and are left out. Prints the median seconds per step, checkpoints included, the ratio to
lock-step, of all steps and of each round, and the oldest token that was trained on, which must not be older than the
bound.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.vs_trl.cases import CASES
from benchmarks.vs_trl.sides import configured
from orchestrator.monitoring.metrics import read_metrics
from quartet.wire.pairs import Pair

WARM_UP = 2
PAUSE = "QUARTET_BENCHMARK_PAUSE_S"
Lines = Sequence[Mapping[str, float]]
Turn = Mapping[int, Lines]
"""Bound on staleness -> metrics of the steps of one run."""
console = Console()


def slow_reward(pairs: Sequence[Pair]) -> list[float]:
    """A score for each pair after a pause that does not depend on how many there are."""
    time.sleep(float(os.environ.get(PAUSE, "0")))
    return [min(len(pair.response.split()), 20) / 10 - 1 for pair in pairs]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=WARM_UP + 2)] = 8,
    staleness: Annotated[str, typer.Option(help="Bounds; the others are compared with the first.")] = "0,1",
    pause: Annotated[float, typer.Option(min=0)] = 0.0,
    config: Path = Path("deploy/ppo.yaml"),
    case: Annotated[str, typer.Option(help=f"Any of {', '.join(CASES)}, instead of a file.")] = "",
) -> None:
    """Runs the benchmark and prints its results."""
    bounds = [int(bound) for bound in staleness.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        raw = _made(case, folder) if case else yaml.safe_load(config.read_text())
        if pause:
            reward = next(a for a in raw["applications"] if a["import_path"].startswith("services.reward"))
            reward["args"]["scorer"] = {"kind": "function", "function": "benchmarks.overlap:slow_reward"}
            os.environ[PAUSE] = str(pause)
        files = {bound: _variant(raw, folder, bound, steps) for bound in bounds}
        _quartet("up", str(files[bounds[0]]))
        try:
            turns = [_turn(files, f"round {round_ + 1} of {rounds}") for round_ in range(rounds)]
        finally:
            _quartet("down")
    console.print(_table(turns, f"{case or config}, {rounds} x {steps} steps"))


def _made(case: str, folder: Path) -> dict[str, Any]:
    """The file of a case, whose models are made."""
    CASES[case].make(folder)
    return configured(folder, CASES[case])


def _turn(files: Mapping[int, Path], name: str) -> Turn:
    """The metrics of one run at each bound, without the steps that warm up."""
    turn = {bound: _train(file, bound)[WARM_UP:] for bound, file in files.items()}
    times = ", ".join(f"{bound}: {_seconds(lines):.2f} s" for bound, lines in turn.items())
    console.print(f"{name} done; {times}")
    return turn


def _seconds(lines: Lines) -> float:
    return median(line["seconds/wall"] for line in lines)


def _table(turns: Sequence[Turn], title: str) -> Table:
    first = next(iter(turns[0]))
    columns = ("max_staleness", "s per step", f"those of {first} / these", "each round", "oldest token")
    table = Table(*columns, title=title)
    together = {bound: [line for turn in turns for line in turn[bound]] for bound in turns[0]}
    for bound, lines in together.items():
        each = ", ".join(f"{_seconds(turn[first]) / _seconds(turn[bound]):.2f}" for turn in turns)
        oldest = max(line["policy/staleness"] for line in lines)
        ratio = _seconds(together[first]) / _seconds(lines)
        table.add_row(str(bound), f"{_seconds(lines):.2f}", f"{ratio:.2f}", each, f"{oldest:.0f} versions")
    return table


def _variant(raw: dict[str, Any], folder: Path, bound: int, steps: int) -> Path:
    section = raw["orchestrator"] | {"name": f"overlap-{bound}", "steps": steps, "loop": {"max_staleness": bound}}
    section |= {
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0, "journal": False},
        "log": {"tensorboard": False},
    }
    section["save"] = str(folder / "trained")
    file = folder / f"overlap-{bound}.yaml"
    file.write_text(yaml.safe_dump(raw | {"orchestrator": section}))
    return file


def _train(file: Path, bound: int) -> Lines:
    _quartet("train", "--overwrite", str(file))
    return [line for line in read_metrics(Path("runs") / f"overlap-{bound}" / "metrics.jsonl") if line["step"] > 0]


def _quartet(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "orchestrator.cli", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"quartet {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    typer.run(main)
