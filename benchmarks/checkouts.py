"""Seconds per step of the demo in this checkout of the project and in another one, taking turns step by step.

    python -m recipes.reviews                          # once: the demo's models
    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.checkouts ../before [--rounds 20] [--steps 1]

Each side runs the deploy/ppo.yaml of its own checkout, without evaluations and checkpoints, with its own environment,
since vLLM finds the project by what is installed there. Both use the models in the current folder. Both run at the
same time, but all processes of one are stopped while the other takes its turn, of `--steps` steps: a machine's speed
changes within minutes, and by more than the sides differ. Prints the ratio of the turns of each round, between which
ratios the middle half lies, and the ratio of the sides' medians. The first steps, which warm up, are left out.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from benchmarks.family import Family
from orchestrator.deployment.listeners import free_ports

HERE = Path(__file__).parents[1]
WARM_UP = 3
LONGEST_S = 300
"""Seconds that a turn may take."""
console = Console()


def main(
    other: Annotated[Path, typer.Argument(help="The other checkout, with an environment in .venv.")],
    rounds: Annotated[int, typer.Option(min=2)] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 1,
) -> None:
    """Runs the benchmark and prints its results."""
    last = WARM_UP + rounds * steps + 1
    turns: dict[str, list[float]] = {"other": [], "this": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with _running(other.absolute(), folder / "other", last) as a, _running(HERE, folder / "this", last) as b:
            sides = {"other": a, "this": b}
            for number in range(rounds):
                for name in sorted(sides, reverse=bool(number % 2)):
                    turns[name].append(sides[name].turn(steps) / steps)
                console.print(f"round {number + 1}: this / other = {turns['this'][-1] / turns['other'][-1]:.2f}")
    for name, seconds in turns.items():
        console.print(f"{name}: {median(seconds):.2f} s per step")
    ratios = [this / before for this, before in zip(turns["this"], turns["other"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    ratio = median(turns["this"]) / median(turns["other"])
    console.print(
        f"this / other: {ratio:.2f} of the medians; half of {rounds} rounds lie within {low:.2f} to {high:.2f}"
    )


class Side:
    """A run of one checkout, which goes on only during its turns."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._checkout = checkout
        self._folder = folder
        self._log = folder / "log"
        self._metrics = folder / "runs/demo/metrics.jsonl"
        self._run: subprocess.Popen[bytes] | None = None
        self._family = Family(str(folder))

    def start(self, steps: int) -> None:
        """Starts the services and a run of so many steps; returns when it has warmed up, and is stopped.

        Raises:
            SystemExit: the services or the run did not start; the message holds what they printed last.
        """
        self._folder.mkdir()
        (self._folder / "models").symlink_to(Path("models").absolute())
        (self._folder / "demo.yaml").write_text(yaml.safe_dump(_configured(self._checkout, steps)))
        if self._quartet("up", "demo.yaml").wait():
            raise SystemExit(self._last_words("`quartet up` failed"))
        self._run = self._quartet("train", "demo.yaml")
        self.turn(WARM_UP)

    def turn(self, steps: int) -> float:
        """Goes on for so many steps; the seconds that they took.

        Raises:
            SystemExit: the run ended, or took more than LONGEST_S seconds.
        """
        start, target = time.perf_counter(), self._steps() + steps
        self._family.go_on()
        while self._steps() < target:
            if not self._run or self._run.poll() is not None or time.perf_counter() - start > LONGEST_S:
                raise SystemExit(self._last_words(f"the run ended, or took more than {LONGEST_S} s for a turn"))
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        self._family.stop()
        return seconds

    def end(self) -> None:
        """Ends the run and the services."""
        self._family.go_on()
        if self._run:
            self._run.kill()
        self._quartet("down").wait()

    def _quartet(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [str(self._checkout / ".venv/bin/quartet"), *arguments]
        environment = os.environ | {"PYTHONPATH": str(self._checkout)} | self._family.environment
        with self._log.open("ab") as log:
            return subprocess.Popen(command, cwd=self._folder, env=environment, stdout=log, stderr=log)

    def _steps(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def _last_words(self, what: str) -> str:
        return f"{self._checkout}: {what}:\n{self._log.read_text(errors='replace')[-4000:]}"


@contextmanager
def _running(checkout: Path, folder: Path, steps: int) -> Iterator[Side]:
    """A side that has warmed up and waits for its turn."""
    side = Side(checkout, folder)
    try:
        side.start(steps)
        yield side
    finally:
        side.end()


def _configured(checkout: Path, steps: int) -> dict[str, Any]:
    """The checkout's demo, on free ports."""
    raw: dict[str, Any] = yaml.safe_load((checkout / "deploy/ppo.yaml").read_text())
    http, grpc = free_ports(2)
    raw["http_options"] = raw.get("http_options", {}) | {"port": http}
    raw["grpc_options"] |= {"port": grpc}
    run = raw["orchestrator"]
    run |= {"target": f"127.0.0.1:{grpc}", "steps": steps, "checkpoint": {"every": 0}, "log": {"tensorboard": False}}
    run["evaluation"] |= {"every": 0}
    return raw


if __name__ == "__main__":
    typer.run(main)
