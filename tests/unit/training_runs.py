"""Trainings on examples with a tiny model: their runs, and what is left of them."""

import asyncio
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from orchestrator.commands.supervised import TrainingFile, fit
from orchestrator.monitoring.metrics import read_metrics
from orchestrator.monitoring.progress import PlainProgress

Weights = Mapping[str, torch.Tensor]


class Stopped(Exception):
    """A run was ended in the midst."""


def stop() -> None:
    """Ends the run in which it is called."""
    raise Stopped


class Watched(PlainProgress):
    """A display that does something after some steps, once each."""

    def __init__(self, after: Mapping[int, Callable[[], None]]) -> None:
        self.lines = io.StringIO()
        super().__init__(self.lines)
        self._after, self._step = dict(after), 0

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        super().step(step, metrics, seconds_left)
        self._step = step

    async def pause(self) -> None:
        self._after.pop(self._step, lambda: None)()


class Runs:
    """Runs below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""

    def run(
        self,
        command: str,
        fields: Mapping[str, Any],
        *,
        after: Mapping[int, Callable[[], None]] = {},
        resume: bool = False,
        **places: Any,
    ) -> Path:
        """Carries out a training of a file with these fields, and does something `after` some steps; returns its
        folder. `places` are `fit`'s `start` and `connect`."""
        file = self.folder / f"{fields['name']}.yaml"
        file.write_text(json.dumps(fields))
        progress, run_dir = Watched(after), self.folder / "runs" / str(fields["name"])
        try:
            asyncio.run(fit(TrainingFile.load(command, file), progress, run_dir=run_dir, resume=resume, **places))
        finally:
            self.said = progress.lines.getvalue()
        return run_dir


def words(rng: np.random.Generator, most: int) -> str:
    """From one to `most` random words."""
    return " ".join(f"w{token}" for token in rng.integers(4, 60, rng.integers(1, most + 1)))


def rows(command: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Examples of random words."""
    rng = np.random.default_rng(seed)
    keys = {"sft": ("response",), "reward-model": ("chosen", "rejected")}[command]
    return [{"prompt": words(rng, 6)} | {key: words(rng, 12) for key in keys} for _ in range(count)]


def weights(folder: Path) -> Weights:
    """The weights of a saved model."""
    loaded: Weights = load_file(folder / "model.safetensors")
    return loaded


def same(one: Weights, other: Weights) -> bool:
    """True if all weights are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def measured(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics without times."""
    lines = read_metrics(run / "metrics.jsonl")
    clock = ("time", "seconds/", "tokens_per_s/")
    return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in lines]
