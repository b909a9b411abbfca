"""The user's view of a run: a live line in a terminal, plain lines elsewhere."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from orchestrator.monitoring.metrics import judge_names
from orchestrator.monitoring.terminal import printable

_PARTS = {"policy": "learner", "rollout": "rollout"}
"""The parts of which the phrase speaks, and their names in it."""
_AWAITED_WORDS = {
    "rollout": "samples",
    "environment": "answers",
    "scoring": "scores",
    "policy": "the policy",
    "critic": "the critic",
    "push": "the push",
    "evaluation": "the evaluation",
    "checkpoint": "the checkpoint",
    "loop": "the orchestrator",
}
_LEAST_SHARE = 0.01
"""Smallest share that is worth a word."""


class Progress(Protocol):
    """Shows each step as it ends."""

    def start(self, total_steps: int, done: int) -> None: ...

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Shows the evaluation before the first step."""

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None: ...

    async def pause(self) -> None:
        """Returns when the next step may begin."""

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class TimeLeft:
    """Estimates the time of the remaining steps from the mean of the last ten."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._recent: deque[float] = deque(maxlen=10)

    def update(self, step: int, seconds: float) -> float:
        """Records a step (counted from 1) and its duration; returns the seconds left."""
        self._recent.append(seconds)
        return (self._total - step) * sum(self._recent) / len(self._recent)


class Headline:
    """The most important figures: the score, the KL, and the last evaluation's judges or score; of a training on
    examples the loss, and its held-out accuracy or loss."""

    def __init__(self) -> None:
        self._held_out: dict[str, float] = {}

    def update(self, metrics: Mapping[str, float]) -> str:
        """The figures of a step as text. Those of an evaluation stay until the next one."""
        self._held_out = _held_out(metrics) or self._held_out
        own = {"score": "score/mean", "KL": "kl/reference", "loss": "train/loss"}
        named = {name: metrics.get(metric) for name, metric in own.items()} | self._held_out
        # Rounded first, as a mean of just below 0 would be -0.00.
        return "  ".join(f"{name} {round(value, 2) + 0.0:.2f}" for name, value in named.items() if value is not None)


class _Live(Bar):
    """A live bar with a line below it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the line once there is one."""
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, style="dim", overflow="ellipsis", no_wrap=True)


class RichProgress:
    """A bar with the headline and the time left, on one live line; below it who waits for whom."""

    def __init__(self, console: Console) -> None:
        self._console, self._headline = console, Headline()
        self._live = _Live(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[headline]}", markup=False),
            TextColumn("{task.fields[left]}", style="dim", markup=False),
            console=console,
        )
        self._task = self._live.add_task("", start=False, visible=False, headline="", left="")

    def start(self, total_steps: int, done: int) -> None:
        self._live.update(self._task, total=total_steps, completed=done, visible=True)
        self._live.start()

    def before_training(self, metrics: Mapping[str, float]) -> None:
        self.note(f"before training  {self._headline.update(metrics)}")

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        self._live.below = who_waits(metrics)
        self._live.update(
            self._task,
            completed=step,
            headline=self._headline.update(metrics),
            left=f"{duration(seconds_left)} left",
        )

    async def pause(self) -> None:
        """Returns at once."""

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False)

    def stop(self) -> None:
        self._live.stop()


class PlainProgress:
    """One line per step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._headline, self._total = stream, Headline(), 0

    def start(self, total_steps: int, done: int) -> None:
        self._total = total_steps

    def before_training(self, metrics: Mapping[str, float]) -> None:
        self.note(f"before training  {self._headline.update(metrics)}")

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        headline, waits = self._headline.update(metrics), who_waits(metrics)
        line = f"step {step}/{self._total}  {headline}  {duration(seconds_left)} left"
        self.note(f"{line}  ({waits})" if waits else line)

    async def pause(self) -> None:
        """Returns at once."""

    def note(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def stop(self) -> None:
        """Does nothing: plain lines stay."""


def make_progress(stream: TextIO) -> Progress:
    """A live line if `stream` is a terminal, plain lines if not."""
    return RichProgress(Console(file=stream)) if stream.isatty() else PlainProgress(stream)


def duration(seconds: float) -> str:
    """Text such as `42 s`, `3 min 20 s` or `2 h 5 min`; `?` for NaN."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _held_out(metrics: Mapping[str, float]) -> dict[str, float]:
    """Judge -> score, or without judges the held-out score, accuracy or loss; empty if there was no evaluation."""
    if judges := judge_names(metrics):
        return {name: metrics[f"eval/{name}"] for name in judges}
    names = {"score": "held-out", "accuracy": "held-out accuracy", "loss": "held-out loss"}
    found = [(shown, metrics[f"eval/{name}"]) for name, shown in names.items() if f"eval/{name}" in metrics]
    return dict(found[:1])


def who_waits(metrics: Mapping[str, float]) -> str:
    """The longest wait of learner and rollout, such as `learner waited 38 % for samples, rollout 12 % for the push`;
    empty if they hardly waited or `wait/…` was not measured."""
    said: list[str] = []
    for part, name in _PARTS.items():
        waits = {whom: metrics.get(f"wait/{part}/{whom}", 0.0) for whom in _AWAITED_WORDS}
        whom = max(waits, key=lambda each: waits[each])
        if waits[whom] >= _LEAST_SHARE:
            verb = "" if said else "waited "
            said.append(f"{name} {verb}{100 * waits[whom]:.0f} % for {_AWAITED_WORDS[whom]}")
    return ", ".join(said)
