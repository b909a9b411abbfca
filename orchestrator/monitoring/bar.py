"""A progress bar for work that consists of many rows, on a terminal; nothing elsewhere."""

from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """A context in which a bar is shown if the stream is a terminal."""

    def __init__(self, stream: TextIO, what: str, total: float | None, done: int = 0) -> None:
        """
        Args:
            stream: where the bar is drawn.
            what: the work in a word or two.
            total: its amount; None if it is not known.
            done: the part that an earlier command has done.
        """
        self._progress = Progress(
            TextColumn(f"[bold]{what}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn() if total is None or total < 1e9 else TextColumn("{task.percentage:.0f} %"),
            TextColumn("{task.fields[remark]}", style="dim", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            disable=not stream.isatty(),
        )
        self._task = self._progress.add_task("", total=total, completed=done, remark="")

    def advance(self, amount: float, remark: str = "") -> None:
        """Shows that `amount` more is done, with a remark behind the bar."""
        self._progress.update(self._task, advance=amount, remark=remark)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
