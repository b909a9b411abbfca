"""Cost of TLS and authentication to training: processor time and seconds of a PPO step behind an open port, the
owner's token, and TLS.

    python -m recipes.reviews                        # once: the demo's models
    python -m benchmarks.secured_steps [--rounds 2] [--steps 20] [--side open --side again --side tls] [--in-turns]

Each side is a quartet of the same file, on a Ray head in a folder of its own; they are started in the order given.
`again` is a second open port: how far it is from the first tells how much equal quartets differ. They train at the
same time or, with --in-turns, one after the other.

Processor time is that of all processes of the quartet and of `quartet train`, over the same number of steps for every
side, without the first ones. It does not depend on who gets the cores, as seconds do. TLS and tokens are the work of
Serve's proxy and of `quartet train` alone, which hardly vary otherwise: what these two need more than behind the open
port, as a share of all its processor time, is the figure to go by. Prints it, the processor time by kind of process,
and the ratios of processor time and seconds.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.processor_time import KINDS, Meter
from orchestrator.deployment import cluster
from orchestrator.deployment.listeners import free_ports
from orchestrator.monitoring.metrics import FILE, read_metrics
from services.common.security.credentials import VARIABLE
from services.common.security.keys.folder import Keys

HOST = "127.0.0.1"
WARM_UP = 3
LOOK_EVERY_S = 0.05
OPEN = "open"
ENDS = ("quartet train", "Serve's proxy")
console = Console()


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of one run's counted steps."""

    seconds: float
    processor: dict[str, float]
    """Seconds by kind of process."""

    @property
    def processors(self) -> float:
        """Seconds of all processes."""
        return self.of(*KINDS)

    def of(self, *kinds: str) -> float:
        """Seconds of these kinds of processes."""
        return sum(self.processor[kind] for kind in kinds)


@dataclass(frozen=True, slots=True)
class Side:
    """A quartet in a folder of its own."""

    folder: Path
    credentials: dict[str, str]
    steps: int
    """Counted steps of a run."""
    spent: list[Spent] = field(default_factory=list)
    """One entry per round."""

    @property
    def config(self) -> Path:
        """The YAML file of this quartet."""
        return self.folder / "ppo.yaml"

    def quartet(self, *arguments: str) -> None:
        """Runs the command `quartet` in the folder."""
        command = self._command(*arguments)
        _, errors = command.communicate()
        if command.returncode:
            raise RuntimeError(f"quartet {' '.join(arguments)}: {errors}")

    def train(self) -> None:
        """Makes one run and notes what its steps cost."""
        for old in self.folder.glob(f"runs/*/{FILE}"):
            old.unlink()
        run = self._command("train", "--overwrite", str(self.config))
        meter = Meter()
        self._await_step(run, WARM_UP - 1)
        head = cluster.running(self.folder / cluster.STATE)
        assert head
        own = psutil.Process(run.pid)
        meter.watch([*head.processes(), own, *own.children(recursive=True)])
        self._await_step(run, WARM_UP)
        began, before = time.monotonic(), meter.read()
        self._await_step(run, WARM_UP + self.steps)
        ended, after = time.monotonic(), meter.read()
        _, errors = run.communicate()
        if run.returncode:
            raise RuntimeError(f"quartet train: {errors}")
        self.spent.append(Spent(ended - began, {kind: total - before[kind] for kind, total in after.items()}))

    def _command(self, *arguments: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("quartet")), *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | self.credentials,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _await_step(self, run: "subprocess.Popen[str]", step: int) -> None:
        while run.poll() is None:
            for metrics in self.folder.glob(f"runs/*/{FILE}"):
                if any(line["step"] >= step for line in read_metrics(metrics)):
                    return
            time.sleep(LOOK_EVERY_S)
        raise RuntimeError(f"quartet train ended before step {step}: {run.communicate()[1]}")


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int, typer.Option(min=2)] = 20,
    side: Annotated[list[str], typer.Option()] = [OPEN, "again", "tls"],  # noqa: B006 - typer copies it
    in_turns: Annotated[bool, typer.Option("--in-turns")] = False,
    config: Path = Path("deploy/ppo.yaml"),
) -> None:
    """Runs the benchmark and prints its results."""
    with tempfile.TemporaryDirectory() as name:
        raw = yaml.safe_load(config.read_text())
        sides = {called: _make(Path(name) / called, raw, steps, _SIDES[called]) for called in side}
        try:
            for quartet in sides.values():
                quartet.quartet("up", str(quartet.config))
            for round_ in range(rounds):
                _round(sides, round_, in_turns=in_turns)
        finally:
            for quartet in sides.values():
                quartet.quartet("down")
    _report(sides, steps)


def _round(sides: Mapping[str, Side], number: int, *, in_turns: bool) -> None:
    """One run of each side. In turns, each begins in another round."""
    order = list(sides.values())
    order = order[number % len(order) :] + order[: number % len(order)]
    with ThreadPoolExecutor(1 if in_turns else len(order)) as pool:
        list(pool.map(Side.train, order))
    told = (
        f"{name} {side.spent[-1].processors:.1f} s on the processors, {side.spent[-1].seconds:.1f} s in all"
        for name, side in sides.items()
    )
    console.print(f"round {number + 1}: {'; '.join(told)}")


def _report(sides: Mapping[str, Side], steps: int) -> None:
    """Prints each side's cost per step, and its ratio to the open port over all rounds and round by round."""
    for name, values in {
        "processor time": {name: [spent.processors for spent in side.spent] for name, side in sides.items()},
        "time": {name: [spent.seconds for spent in side.spent] for name, side in sides.items()},
    }.items():
        for side, totals in values.items():
            base = values.get(OPEN, totals)
            pairs = ", ".join(f"{one / other:.3f}" for one, other in zip(totals, base, strict=True))
            each = sum(totals) / len(totals) / steps
            console.print(f"{name}, {side}: {each:.3f} s per step, {sum(totals) / sum(base):.3f} of {OPEN} ({pairs})")
    console.print(_by_kind(sides, steps))
    _report_ends(sides, steps)


def _report_ends(sides: Mapping[str, Side], steps: int) -> None:
    """Prints what the two ends of the connection need more than behind the open port."""
    if OPEN not in sides:
        return
    base = sides[OPEN].spent
    for name, side in sides.items():
        more = [one.of(*ENDS) - other.of(*ENDS) for one, other in zip(side.spent, base, strict=True)]
        pairs = ", ".join(f"{one / other.processors:+.2%}" for one, other in zip(more, base, strict=True))
        share, each = sum(more) / sum(spent.processors for spent in base), sum(more) / len(more) / steps * 1e3
        console.print(f"{' and '.join(ENDS)}, {name}: {each:+.1f} ms a step, {share:+.2%} of {OPEN}'s step ({pairs})")


def _by_kind(sides: Mapping[str, Side], steps: int) -> Table:
    table = Table("processor time of a step, ms", *sides)
    for kind in KINDS:
        totals = [sum(spent.processor[kind] for spent in side.spent) / len(side.spent) for side in sides.values()]
        table.add_row(kind, *(f"{total / steps * 1e3:.1f}" for total in totals))
    return table


def _open(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    return {"local": "open"}, {}


def _token(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    return {"local": "token"}, {}


def _tls(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    keys = Keys(folder / "keys", days=1)
    keys.make([HOST], {"run-a": "trainer"}, tokens=False)
    return {"policy": str(keys.policy)}, {VARIABLE: str(keys.folder / "clients" / "run-a")}


_SIDES: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, str]]]] = {
    OPEN: _open,
    "again": _open,
    "token": _token,
    "tls": _tls,
}
"""Each gives the section `security` of the file, and what its callers show."""


def _make(
    folder: Path, raw: dict[str, Any], steps: int, secure: Callable[[Path], tuple[dict[str, Any], dict[str, str]]]
) -> Side:
    folder.mkdir()
    (folder / "models").symlink_to(Path("models").resolve())
    security, credentials = secure(folder)
    side = Side(folder, credentials, steps)
    http, grpc = free_ports(2)
    orchestrator = raw["orchestrator"] | {"target": f"{HOST}:{grpc}", "evaluation": {"every": 0}}
    # One step more than what is counted, so that the end of the run is not.
    orchestrator |= {"steps": WARM_UP + steps + 1}
    ports = {
        "http_options": raw["http_options"] | {"port": http},
        "grpc_options": raw["grpc_options"] | {"port": grpc},
    }
    side.config.write_text(yaml.safe_dump(raw | ports | {"security": security, "orchestrator": orchestrator}))
    return side


if __name__ == "__main__":
    typer.run(main)
