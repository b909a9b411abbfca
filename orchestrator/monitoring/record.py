"""Reports of a run: each step's metrics to the log, and a line to the user."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from orchestrator.monitoring.metrics import MetricsLog
from orchestrator.monitoring.progress import Progress, TimeLeft


class Record:
    """The metrics log and the progress display of one run."""

    def __init__(self, log: MetricsLog, progress: Progress, total_steps: int) -> None:
        self._log = log
        self._progress = progress
        self._total_steps = total_steps
        self._time_left = TimeLeft(total_steps)

    @contextmanager
    def running(self, done: int) -> Iterator[None]:
        """Context in which progress is shown, from step `done` on."""
        self._progress.start(self._total_steps, done)
        try:
            yield
        finally:
            self._progress.stop()

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Logs the metrics from before the first step, as step 0, and shows them."""
        self._log.write(0, metrics)
        self._progress.before_training(metrics)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one step and shows it. `metrics` must hold `seconds/step`."""
        self._log.write(step, metrics)
        self._progress.step(step, metrics, self._time_left.update(step, metrics["seconds/step"]))

    async def pause(self) -> None:
        """Waits between two steps, if the user wants to."""
        await self._progress.pause()

    def note(self, text: str) -> None:
        """Shows a message to the user."""
        self._progress.note(text)
