"""Seconds per PPO step in lock-step and with sampling ahead, on the same services, taking turns.

    python -m recipes.reviews                       # once: the demo's models
    python -m benchmarks.overlap [--rounds 3] [--steps 8] [--pause 0] [--config deploy/ppo.yaml]

`--pause 0.5` makes the reward a function that takes half a second per call, as a remote judge does: what lock-step
waits for, sampling ahead works through. Every round trains once at each staleness; the first two steps of a run have
nothing ahead of them yet and are left out. Prints the median seconds per step, the ratio to lock-step, and the oldest
token that was trained on, which must not be older than the bound.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from orchestrator.monitoring.metrics import read_metrics
from services.common.wire.pairs import Pair

WARM_UP = 2
PAUSE = "QUARTET_BENCHMARK_PAUSE_S"
console = Console()


def slow_reward(pairs: Sequence[Pair]) -> list[float]:
    """A score for each pair after a pause that does not depend on how many there are."""
    time.sleep(float(os.environ.get(PAUSE, "0")))
    return [min(len(pair.response.split()), 20) / 10 - 1 for pair in pairs]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=WARM_UP + 2)] = 8,
    pause: Annotated[float, typer.Option(min=0)] = 0.0,
    config: Path = Path("deploy/ppo.yaml"),
) -> None:
    """Runs the benchmark and prints its results."""
    raw = yaml.safe_load(config.read_text())
    if pause:
        reward = next(a for a in raw["applications"] if a["import_path"].startswith("services.reward"))
        reward["args"]["scorer"] = {"kind": "function", "function": "benchmarks.overlap:slow_reward"}
        os.environ[PAUSE] = str(pause)
    seconds: dict[int, list[float]] = {0: [], 1: [], 2: []}
    oldest = dict.fromkeys(seconds, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        up = _variant(raw, Path(folder), 0, steps)
        _quartet("up", str(up))
        try:
            for round_ in range(rounds):
                for bound in seconds:
                    lines = _train(_variant(raw, Path(folder), bound, steps), bound)
                    seconds[bound] += [line["seconds/step"] for line in lines[WARM_UP:]]
                    oldest[bound] = max(oldest[bound], *(line["policy/staleness"] for line in lines))
                console.print(f"round {round_ + 1} of {rounds} done")
        finally:
            _quartet("down")
    table = Table(
        "max_staleness", "s per step", "lock-step / this", "oldest token", title=f"{rounds} x {steps} steps"
    )
    for bound, times in seconds.items():
        ratio = median(seconds[0]) / median(times)
        table.add_row(str(bound), f"{median(times):.2f}", f"{ratio:.2f}", f"{oldest[bound]:.0f} versions")
    console.print(table)


def _variant(raw: dict[str, Any], folder: Path, bound: int, steps: int) -> Path:
    section = raw["orchestrator"] | {"name": f"overlap-{bound}", "steps": steps, "loop": {"max_staleness": bound}}
    section |= {
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0, "journal": False},
        "log": {"tensorboard": False},
    }
    section["save"] = str(folder / "policy")
    file = folder / f"overlap-{bound}.yaml"
    file.write_text(yaml.safe_dump(raw | {"orchestrator": section}))
    return file


def _train(file: Path, bound: int) -> list[dict[str, float]]:
    _quartet("train", "--overwrite", str(file))
    return [line for line in read_metrics(Path("runs") / f"overlap-{bound}" / "metrics.jsonl") if line["step"] > 0]


def _quartet(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "orchestrator.cli", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"quartet {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    typer.run(main)
