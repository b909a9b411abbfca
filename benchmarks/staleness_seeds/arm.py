"""One run of the comparison: its setting and its result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from orchestrator.monitoring.metrics import read_metrics

NONE = "none"
"""Correction of a run that takes every sample for one of its own: no importance weights."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that runs with different seeds share."""

    staleness: int
    correction: str
    """ppo.correction, or NONE."""
    learning_rate: float
    epochs: int
    steps: int

    def __str__(self) -> str:
        return f"s{self.staleness}-{self.correction}-{self.learning_rate:g}-{self.epochs}x{self.steps}"

    def orchestrator(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """The `orchestrator:` section of deploy/ppo.yaml with this setting."""
        corrected = {"correction": self.correction}
        # A run ahead has to be corrected; the weights of this are 1, whatever the ratio.
        uncorrected = {"correction": "geometric", "importance_band": [0.0, 1e30]}
        weights = uncorrected if self.correction == NONE else corrected
        policy = dict(section["policy"])
        return dict(section) | {
            "steps": self.steps,
            "loop": {"max_staleness": self.staleness},
            "ppo": section["ppo"] | weights | {"epochs": self.epochs},
            "policy": policy | {"optimizer": policy["optimizer"] | {"learning_rate": self.learning_rate}},
        }


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run."""

    setting: Setting
    seed: int
    samples: list[int]
    """Number of training samples before each evaluation."""
    gold: list[float]
    """Held-out gold score at each evaluation."""
    score: list[float]
    """Held-out score of the reward model, which is what the run maximises."""
    kl: float
    """KL to the reference at the end, in nats per response."""
    age: float
    """Mean age of all tokens that were trained on, in versions."""
    oldest: float
    ess: float
    """Smallest effective sample size of a step, as a share of its tokens."""
    corrected: float
    """Mean share of tokens that were corrected."""

    @classmethod
    def of(cls, setting: Setting, seed: int, run: Path, batch: int) -> Self:
        """Reads the metrics of a run."""
        lines = read_metrics(run / "metrics.jsonl")
        evaluated = [line for line in lines if "eval/gold" in line]
        steps = [line for line in lines if line["step"] > 0]
        return cls(
            setting,
            seed,
            samples=[int(line["step"]) * batch for line in evaluated],
            gold=[line["eval/gold"] for line in evaluated],
            score=[line["eval/score"] for line in evaluated],
            kl=evaluated[-1]["eval/kl"],
            age=fmean(line["staleness/mean"] for line in steps),
            oldest=max(line["policy/staleness"] for line in steps),
            ess=min(line["off_policy/ess"] for line in steps),
            corrected=fmean(line["off_policy/corrected"] for line in steps),
        )


class Results:
    """Finished runs, one line each in a file that later calls add to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Result]:
        """All of them, in the order in which they ended."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        raw = [json.loads(line) for line in lines]
        return [Result(**each | {"setting": Setting(**each["setting"])}) for each in raw]

    def add(self, result: Result) -> None:
        """Appends one."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def of(self, settings: Sequence[Setting], seeds: Sequence[int]) -> dict[Setting, list[Result]]:
        """Runs of these seeds by setting, without the settings that have none."""
        mine = {setting: [r for r in self.read() if r.setting == setting and r.seed in seeds] for setting in settings}
        return {setting: results for setting, results in mine.items() if results}
