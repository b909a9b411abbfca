"""One run of `quartet train` that is struck by faults, resumed when it is killed, and watched."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Quartet
from tests.commands import Command

BATCH, MEMBERS, EVERY = 8, 2, 2
"""Samples of a step, responses to a prompt, and steps between two checkpoints."""
START_S = 60
"""Deadline of a start, which takes seconds here."""
LAST = 6
"""Steps after the last fault."""


class ChaosRun:
    """A run whose process may be killed, and is then resumed with the same file."""

    def __init__(self, quartet: Quartet, name: str, staleness: int) -> None:
        self.quartet, self.name = quartet, name
        self.folder = quartet.folder / "runs" / name
        self.log = quartet.folder / f"{name}.log"
        self.config = quartet.folder / f"{name}.yaml"
        self._staleness = staleness
        self.process: Command | None = None
        self.began = 0.0
        """Moment at which the process was started."""
        self.best = 0
        """Highest step that was measured."""
        self.best_at = time.monotonic()
        """Moment at which it was."""
        self.gaps: list[tuple[float, float]] = []
        """Moment and seconds without progress before it, for each step that was the highest."""
        self._resumes = False

    def write(self, steps: int) -> None:
        """Writes its file, for so many steps."""
        raw: dict[str, Any] = dict(self.quartet.raw)
        ours = raw["orchestrator"] | {
            "name": self.name,
            "steps": steps,
            "batch_size": BATCH,
            "prompts_per_call": 2,
            "evaluation": {"every": 0},
            "loop": {"max_staleness": self._staleness},
        }
        # All checkpoints are kept, as the journal is from the oldest on: the samples of each step are looked at.
        ours["checkpoint"] = ours["checkpoint"] | {"every": EVERY, "keep": 10_000}
        ours["algorithm"] = ours["algorithm"] | {"minibatch_size": 4, "samples_per_prompt": MEMBERS}
        ours["timeouts"] = {"start_s": START_S}
        raw["orchestrator"] = ours
        self.config.write_text(yaml.safe_dump(raw))

    def start(self) -> None:
        """Starts its process, which resumes unless it is the first."""
        options = ["--resume"] if self._resumes else []
        self._resumes = True
        self.began = time.monotonic()
        self.process = Command(self.quartet.folder, self.log, "train", str(self.config), *options)

    @property
    def ended(self) -> int | None:
        """The exit code of its process; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    @property
    def pid(self) -> int:
        """Process id of its process."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """Ends its process at once."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def signal(self, number: signal.Signals) -> None:
        """Sends its process a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def look(self) -> None:
        """Notes its progress."""
        step, now = _last_step(self.folder / "metrics.jsonl"), time.monotonic()
        if step > self.best:
            self.gaps.append((now, now - self.best_at))
            self.best, self.best_at = step, now

    def longest_gap(self, since: float) -> float:
        """The longest time without progress, in seconds, that ended or goes on after a moment."""
        ended = [seconds for at, seconds in self.gaps if at > since]
        return max([*ended, time.monotonic() - self.best_at])

    @property
    def usual_s(self) -> float:
        """The median time of a step."""
        gaps = sorted(seconds for _, seconds in self.gaps)
        return gaps[len(gaps) // 2] if gaps else 1.0

    @property
    def returns(self) -> int:
        """Times that it went back to a checkpoint by itself."""
        return self.log.read_text(errors="replace").count("interrupted (") if self.log.exists() else 0

    @property
    def writes(self) -> bool:
        """True while a checkpoint is written."""
        return any((self.folder / "checkpoints").glob(".step-*.writing"))

    def last_words(self, lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


def _last_step(metrics: Path) -> int:
    """The step of the last whole line; 0 without one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 16_384))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (FileNotFoundError, ValueError):
        return 0
