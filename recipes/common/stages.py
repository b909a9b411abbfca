"""Display of a recipe's stages and their wall times."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console


class Stages:
    """Shows each stage while it runs and prints its wall time when it ends, on a terminal and off."""

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as the stage `name`."""
        start = perf_counter()
        with self._console.status(f"{name} ..."):
            yield
        self.seconds[name] = round(perf_counter() - start, 2)
        self._console.print(f"{name:<32} {self.seconds[name]:6.1f} s")
