"""Cost of TLS and authentication to training: seconds per PPO step behind an open port, the owner's token, and TLS.

    python -m recipes.reviews                        # once: the demo's models
    python -m benchmarks.secured_steps [--rounds 3] [--steps 40] [--config deploy/ppo.yaml]

Three quartets of the same file, each on a Ray head in a folder of its own. They train at the same time and share the
cores evenly, so that whatever else the machine does meets all three alike: runs that take turns differ by more than
what is measured. Counted is the time in which all three train, their first steps left out. Prints the seconds per
step and the ratio to the open port, over all rounds and round by round.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.console import Console

from orchestrator.monitoring.metrics import read_metrics
from services.common.security.credentials import VARIABLE
from services.common.security.keys.folder import Keys

HOST = "127.0.0.1"
WARM_UP = 3
OPEN, TOKEN, TLS = "open port", "owner's token", "TLS and certificates"
console = Console()


@dataclass(frozen=True, slots=True)
class Side:
    """A quartet in a folder of its own."""

    folder: Path
    credentials: dict[str, str]

    @property
    def config(self) -> Path:
        """The YAML file of this quartet."""
        return self.folder / "ppo.yaml"

    def quartet(self, *arguments: str) -> None:
        """Runs the command `quartet` in the folder."""
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [str(Path(sys.executable).with_name("quartet")), *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | self.credentials,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"quartet {' '.join(arguments)}: {done.stderr}")

    def ends(self) -> list[float]:
        """Times, in seconds, at which the steps of a run that is made now ended."""
        self.quartet("train", "--overwrite", str(self.config))
        [metrics] = self.folder.glob("runs/*/metrics.jsonl")
        return [line["time"] for line in read_metrics(metrics) if line["step"] >= WARM_UP]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=WARM_UP + 2)] = 40,
    config: Path = Path("deploy/ppo.yaml"),
) -> None:
    """Runs the benchmark and prints its results."""
    with tempfile.TemporaryDirectory() as name:
        raw = yaml.safe_load(config.read_text())
        sides = {side: _make(Path(name) / side.split()[0], raw, steps, secure) for side, secure in _SIDES.items()}
        try:
            for side in sides.values():
                side.quartet("up", str(side.config))
            _report(_race(sides, rounds))
        finally:
            for side in sides.values():
                side.quartet("down")


def _race(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds per step in every round, for each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds):
        with ThreadPoolExecutor(len(sides)) as pool:
            ends = dict(zip(sides, pool.map(Side.ends, sides.values()), strict=True))
        begin, end = max(times[0] for times in ends.values()), min(times[-1] for times in ends.values())
        for name, times in ends.items():
            steps = np.interp([begin, end], times, np.arange(len(times)))
            seconds[name].append((end - begin) / float(steps[1] - steps[0]))
        told = ", ".join(f"{name} {spent[-1]:.3f} s" for name, spent in seconds.items())
        console.print(f"round {round_ + 1}, {end - begin:.0f} s: {told} per step")
    return seconds


def _report(seconds: dict[str, list[float]]) -> None:
    for name, spent in seconds.items():
        pairs = ", ".join(f"{one / other:.3f}" for one, other in zip(spent, seconds[OPEN], strict=True))
        ratio = mean(spent) / mean(seconds[OPEN])
        console.print(f"{name}: {mean(spent):.3f} s per step, over {OPEN} {ratio:.3f} (round by round {pairs})")


def _open(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    return {"local": "open"}, {}


def _token(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    return {"local": "token"}, {}


def _tls(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    keys = Keys(folder / "keys", days=1)
    keys.make([HOST], {"run-a": "trainer"}, tokens=False)
    return {"policy": str(keys.policy)}, {VARIABLE: str(keys.folder / "clients" / "run-a")}


_SIDES: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, str]]]] = {OPEN: _open, TOKEN: _token, TLS: _tls}
"""Each gives the section `security` of the file, and what its callers show."""


def _make(
    folder: Path, raw: dict[str, Any], steps: int, secure: Callable[[Path], tuple[dict[str, Any], dict[str, str]]]
) -> Side:
    folder.mkdir()
    (folder / "models").symlink_to(Path("models").resolve())
    security, credentials = secure(folder)
    side = Side(folder, credentials)
    http, grpc = _free_ports()
    orchestrator = raw["orchestrator"] | {"target": f"{HOST}:{grpc}", "steps": steps, "evaluation": {"every": 0}}
    ports = {
        "http_options": raw["http_options"] | {"port": http},
        "grpc_options": raw["grpc_options"] | {"port": grpc},
    }
    side.config.write_text(yaml.safe_dump(raw | ports | {"security": security, "orchestrator": orchestrator}))
    return side


def _free_ports() -> list[int]:
    probes = [socket.socket() for _ in range(2)]
    for probe in probes:
        probe.bind((HOST, 0))
    numbers = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return numbers


if __name__ == "__main__":
    typer.run(main)
