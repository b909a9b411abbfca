"""Seconds per step of the demo in this checkout of the project and in another one, taking turns.

    python -m recipes.reviews                          # once: the demo's models
    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.checkouts ../before [--rounds 2] [--steps 10]

Each side runs the deploy/ppo.yaml of its own checkout, without evaluations, with its own environment, since vLLM
finds the project by what is installed there. Both use this checkout's models. Services are started for each turn and
ended after it, so that the sides do not share the cores. The first two steps of a turn, which warm up, are left out.
Prints the median seconds per step of each side, and the ratio of each round.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import yaml
from rich.console import Console

from orchestrator.monitoring.metrics import read_metrics

HERE = Path(__file__).parents[1]
WARM_UP = 2
console = Console()


def main(
    other: Annotated[Path, typer.Argument(help="The other checkout, with an environment in .venv.")],
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int, typer.Option(min=WARM_UP + 1)] = 10,
) -> None:
    """Runs the benchmark and prints its results."""
    sides: dict[str, list[float]] = {"other": [], "this": []}
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        for round_ in range(rounds):
            for name, checkout in (("other", other.absolute()), ("this", HERE)):
                folder = Path(temporary) / f"{name}-{round_}"
                sides[name].append(_turn(checkout, folder, steps))
            ratios.append(sides["this"][-1] / sides["other"][-1])
            console.print(f"round {round_ + 1}: this / other = {ratios[-1]:.2f}")
    for name, seconds in sides.items():
        console.print(f"{name}: {median(seconds):.2f} s per step")
    console.print(f"this / other: {median(ratios):.2f} in the median of {rounds} rounds")


def _turn(checkout: Path, folder: Path, steps: int) -> float:
    """Seconds of a step, in the median of one run."""
    folder.mkdir()
    (folder / "models").symlink_to(HERE / "models")
    raw = yaml.safe_load((checkout / "deploy/ppo.yaml").read_text())
    raw["orchestrator"] |= {"steps": steps, "checkpoint": {"every": 0}, "log": {"tensorboard": False}}
    raw["orchestrator"]["evaluation"] |= {"every": 0}
    file = folder / "demo.yaml"
    file.write_text(yaml.safe_dump(raw))
    try:
        _quartet(checkout, folder, "up", str(file))
        _quartet(checkout, folder, "train", str(file))
    finally:
        _quartet(checkout, folder, "down")
    lines = [line for line in read_metrics(folder / "runs/demo/metrics.jsonl") if line["step"] > WARM_UP]
    return median(line["seconds/step"] for line in lines)


def _quartet(checkout: Path, folder: Path, *arguments: str) -> None:
    command = [str(checkout / ".venv/bin/quartet"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    typer.run(main)
