"""Figures that are kept as they come."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.ended import ended
from benchmarks.figures import append, keep, mend

console = Console(width=160)
LONGEST_S = 200.0
"""Longest time of a process of its own, in seconds."""
Cell = str | float | int
LIST = "longest"
"""Name of a cell that is too long for a table."""


class Results:
    """One table, each row of which is written to `<folder>/<name>.jsonl` before the next is measured, after those of
    earlier runs."""

    def __init__(self, name: str, folder: Path) -> None:
        """Writes what the machine is above the rows of this run."""
        folder.mkdir(parents=True, exist_ok=True)
        self._name, self._path = name, folder / f"{name}.jsonl"
        self._rows: list[dict[str, Cell]] = []
        self._began = time.time()
        self.last_worked = True
        """False if the last attempt raised."""
        mend(self._path)
        append(self._path, {"date": time.strftime("%Y-%m-%d %H:%M:%S"), **machine()})

    def add(self, what: str, **figures: Cell) -> None:
        """Keeps a row."""
        row: dict[str, Cell] = {"what": what, **figures}
        self._rows.append(row)
        append(self._path, row)
        keep(what, figures)
        cells = ", ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        console.print(f"[{time.time() - self._began:5.0f} s] {what}: {cells}", highlight=False, markup=False)

    def attempt(self, what: str, measure: Callable[[], dict[str, Cell]]) -> None:
        """Keeps what `measure` gives, or why it could not: the other figures are worth having all the same."""
        try:
            self.add(what, **measure())
            self.last_worked = True
        except Exception as error:
            self.last_worked = False
            self.add(what, error=f"{type(error).__name__}: {str(error)[:200]}")
            console.print(str(error)[200:], highlight=False, markup=False)

    def show(self) -> None:
        """Prints the table."""
        names = list(dict.fromkeys(name for row in self._rows for name in row if name != LIST))
        drawn = Table(*names, title=f"{self._name}: {machine()['device']}", title_justify="left")
        for row in self._rows:
            drawn.add_row(*(escape(_shown(row.get(name, ""))) for name in names))
        console.print(drawn)


def machine() -> dict[str, Cell]:
    """Description of the machine."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1) if gpu else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }


def alone(module: str, arguments: list[str], **variables: str) -> Any:
    """The last line that a module prints, as JSON, in a process of its own, which gives a GPU's memory back.

    Raises:
        RuntimeError: it failed, with the last line of its errors; or was not done after LONGEST_S.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = ended(command, os.environ | variables, None, LONGEST_S)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def seconds(action: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Median over the rounds, after two that warm up, with the device idle before and after each."""
    times = []
    for round_ in range(-2, rounds):
        wait(device)
        began = time.perf_counter()
        action()
        wait(device)
        if round_ >= 0:
            times.append(time.perf_counter() - began)
    return median(times)


def wait(device: torch.device) -> None:
    """Returns when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shown(value: Cell) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
