"""The metrics of a step besides its losses, and the seconds of its stages."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np

from orchestrator.experience.experience import Collected
from orchestrator.loop.state import TrainState
from orchestrator.tracing.waits import Waits

WAIT_OF_STAGE = {"logprobs": "logprobs", "train": "training", "publish": "push", "evaluate": "evaluation"}
"""Stage of a step -> what the loop waits for in it. The stage `take` waits for several things, which Waits.for_batch
tells apart."""


class StepReport:
    """Measures one step: the seconds of its stages, what the loop waits for in them, and metrics by name."""

    def __init__(self, waits: Waits) -> None:
        """Begins the step. `waits` records what the loop waits for."""
        self._waits = waits
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._metrics: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context of a stage; a stage that comes twice counts the sum."""
        began = time.monotonic()
        try:
            with self._waits(WAIT_OF_STAGE[name]) if name in WAIT_OF_STAGE else nullcontext():
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def seconds(self, stage: str) -> float:
        """Seconds of a stage so far."""
        return self._seconds[stage]

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics of this step."""
        self._metrics |= metrics

    def metrics(self) -> dict[str, float]:
        """All metrics, with `seconds/<stage>` for each stage."""
        return self._metrics | {f"seconds/{stage}": spent for stage, spent in self._seconds.items()}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began


def ledger(before: TrainState, done: TrainState, collected: Collected) -> dict[str, float]:
    """Counts of samples that were requested, requested again, discarded, without a score, used, and begun by one
    replica and finished by another, with the tokens kept of the first; and of the prompts seen so far. The policy's
    version, and the oldest sample's staleness."""
    kept = collected.columns["kept"]
    oldest = int(collected.columns["versions"].min())
    return {
        "samples/asked": done.samples_asked - before.samples_asked,
        "samples/repeated": collected.repeated,
        "samples/discarded": len(collected.discarded),
        "samples/unscored": sum(math.isnan(each.score) for each in collected.discarded),
        "samples/resumed": int((kept > 0).sum()),
        "samples/tokens_kept": int(kept.sum()),
        "samples/used": done.samples_used - before.samples_used,
        "samples/used_total": done.samples_used,
        "prompts/seen": len(done.prompts_seen),
        "policy/version": done.policy_version,
        "policy/staleness": before.policy_version - oldest,
    }


def staleness(version: int, collected: Collected) -> dict[str, float]:
    """Age of tokens, in versions, when policy `version` trained on them: the mean, and the share of each age."""
    versions, counts = np.unique(collected.columns["versions"], return_counts=True)
    ages = dict(zip((version - versions).tolist(), counts.tolist(), strict=True))
    tokens = collected.tokens
    shares = {f"staleness/share_{age}": ages.get(age, 0) / tokens for age in range(max(ages) + 1)}
    return {"staleness/mean": sum(age * count for age, count in ages.items()) / tokens} | shares


def turns(collected: Collected) -> dict[str, float]:
    """Responses of a conversation, its sequences where some have several, and the rewards of its turns where there
    are some. Nothing in a run without conversations."""
    columns = collected.columns
    if (rewards := columns.get("turn_rewards")) is None:
        return {}
    several = {"sequences/mean": len(columns.sequence_lengths) / len(columns)} if columns.begins is not None else {}
    earned = {"reward/turns": float(rewards.sum()) / len(columns)} if rewards.any() else {}
    return {"turns/mean": float(columns["turn"].mean())} | several | earned


def process(collected: Collected) -> dict[str, float]:
    """The parts of scores that were earned within responses, where the scorer gives such."""
    earned = collected.columns.get("process_rewards")
    return {} if earned is None else {"reward/process": float(earned.sum()) / len(collected.columns)}


def calls(collected: Collected) -> dict[str, float]:
    """Calls of tools that an environment answered in a conversation, and where there were any the share of them that
    was wrong."""
    columns = collected.columns
    answered, wrong = (int(columns[name].sum()) for name in ("calls", "wrong_calls"))
    return {"calls/mean": answered / len(columns)} | ({"calls/wrong": wrong / answered} if answered else {})


def speeds(collected: Collected, train_s: float, epochs: int) -> dict[str, float]:
    """Response tokens per second of training, the seconds of generation and scoring, and those that a response waits
    for the others to its prompt, if there are any."""
    waited = {} if collected.group_s is None else {"seconds/group": collected.group_s}
    return waited | {
        "tokens_per_s/training": collected.tokens * epochs / train_s,
        "seconds/generate": collected.generate_s,
        "seconds/score": collected.score_s,
    }
