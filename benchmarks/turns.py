"""Two sides or more that take turns in one process, and what is told of them."""

import time
from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.results import wait
from quartet.models.device import default_device

console = Console()
Side = Callable[[], object]


def take_turns(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side and round, after two rounds that warm up and do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-2, rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            wait(default_device())
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(title: str, sides: dict[str, list[float]], form: str) -> None:
    """Prints the least, the median and the largest number of each side."""
    drawn = Table(title=title, title_justify="left")
    for column in ("side", "min", "median", "max"):
        drawn.add_column(column, justify="left" if column == "side" else "right")
    for name, values in sides.items():
        drawn.add_row(name, *(form.format(value) for value in (min(values), median(values), max(values))))
    console.print(drawn)


def ratio(name: str, left: list[float], right: list[float]) -> None:
    """Prints the ratio of the medians, and the range of the ratios of each round."""
    pairs = [a / b for a, b in zip(left, right, strict=True)]
    console.print(f"{name}: {median(left) / median(right):.2f} (pair by pair {min(pairs):.2f} to {max(pairs):.2f})")
