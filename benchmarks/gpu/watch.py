"""Shares of time in which a GPU computes while something runs, and what it holds, as nvidia-smi shows it. Without
nvidia-smi there is nothing."""

import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

from benchmarks.gpu.results import Cell
from orchestrator.tracing.activity import stretches
from orchestrator.tracing.spans import Span, Window

Look = tuple[float, float]
"""Seconds since 1970, and the per cent of the moment before in which the GPU computed."""


class Watch:
    """Looks at the GPU five times a second while it is entered."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.looks: list[Look] = []
        self._used = 0.0
        self._held: dict[str, float] = {}

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def memory(self) -> dict[str, Cell]:
        """The GPU's largest memory in GiB, and each process's."""
        if not self.looks:
            return {}
        held = ", ".join(f"{name} {mib / 1024:.1f}" for name, mib in sorted(self._held.items()))
        return {"peak_gib": self._used / 1024, "processes_gib": held}

    def _look(self) -> None:
        with suppress(OSError):
            while not self._over.wait(0.2):
                for busy, used in _asked("gpu", ["utilization.gpu", "memory.used"]):
                    self.looks.append((time.time(), float(busy)))
                    self._used = max(self._used, float(used))
                for process, used in _asked("compute-apps", ["pid", "used_memory"]):
                    name = _name(process)
                    self._held[name] = max(self._held.get(name, 0.0), float(used))


def busy(looks: Sequence[Look], began: float, ended: float, spans: Sequence[Span] = ()) -> dict[str, Cell]:
    """Per cent of the time from `began` to `ended` in which the GPU computed, and of that in which a run's loop
    waited for each thing; nothing for times without a look."""
    whiles = {"": [(began, ended)]}
    for stretch in stretches(Window(began, ended, spans), ()) if spans else ():
        whiles.setdefault(f"{stretch.doing}_", []).append((stretch.began, stretch.ended))
    figures: dict[str, Cell] = {}
    for name, times in whiles.items():
        seen = [share for at, share in looks if any(since < at <= until for since, until in times)]
        if seen:
            figures[f"busy_{name}percent"] = round(mean(seen))
    return figures


def _asked(what: str, fields: Sequence[str]) -> list[list[str]]:
    """nvidia-smi's answer, a list of fields for each line; without lines that hold no numbers."""
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [[field.strip() for field in line.split(",")] for line in printed.splitlines()]
    return [row for row in rows if len(row) == len(fields) and all(field.isdigit() for field in row)]


def _name(process: str) -> str:
    """A process by its title and number, such as `ray::PolicyTrainer 417`."""
    with suppress(OSError):
        words = Path("/proc", process, "cmdline").read_text().replace("\0", " ").split()
        return f"{words[0].rpartition('/')[2]} {process}" if words else process
    return process
