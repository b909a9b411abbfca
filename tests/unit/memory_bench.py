"""Counts the bytes that a learner's rank holds under a layout, on a CPU, where host and device are one."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config import learner
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner import module
from quartet.models.distribution import Distribution
from quartet.models.tiles import TILE_ELEMENTS
from quartet.ranks.ranks import Ranks
from tests.learner_batches import PolicyBatch, train_policy
from tests.unit.allocations import Allocations

LENGTH, PROMPT = 64, 2
SMALL_TILE = 1 << 20
"""Elements of a tile that small models have several of."""
SMALL_BUCKET = 100_000
"""Elements of a bucket of gradients that small models fill."""
SMALL_GROUP = 1_000_000
"""Parameters of one rank in a group of the optimizer, of which small models have several."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)


@dataclass(frozen=True)
class Held:
    """Bytes of all tensors of one rank's learner."""

    rest: int
    """Between two updates."""
    peak: int
    """Most in an update."""
    copies: int
    """The copies from which a checkpoint is written."""


class MemoryBench:
    """Runs layouts, one after the other, in one rank's process."""

    def __init__(self, model: Path, ranks: Ranks) -> None:
        self._model, self._ranks = str(model), ranks
        learner.REDUCE_ELEMENTS = SMALL_BUCKET
        learner.GROUP_ELEMENTS = module.GROUP_ELEMENTS = SMALL_GROUP  # type: ignore[attr-defined]
        for device in TILE_ELEMENTS:
            TILE_ELEMENTS[device] = SMALL_TILE

    def held(self, layout: dict[str, Any], tokens: int, folder: Path) -> Held:
        """Bytes held in a second update of two micro-batches of so many tokens, and in a checkpoint to `folder`."""
        before = Allocations().now
        given: dict[str, Any] = {"optimizer": OPTIMIZER, "ranks": self._ranks.world_size} | layout
        config = PolicyConfig(model=self._model, micro_batch_tokens=tokens, **given)
        count = 2 * tokens // LENGTH * self._ranks.world_size
        trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=count), Distribution(), self._ranks)
        rows = [np.full(LENGTH, 2 + index % 100, np.int32) for index in range(count)]
        numbers = [np.full(LENGTH - PROMPT, -3.0, np.float32)] * count
        prompts, responses = [row[:PROMPT] for row in rows], [row[PROMPT:] for row in rows]
        batch = PolicyBatch(prompts, responses, numbers, numbers, numbers, numbers, 0.0)
        train_policy(trainer, batch, 0)
        counted = Allocations()
        rest = counted.now
        with counted:
            train_policy(trainer, batch, 0)
        again = Allocations().now
        trainer.learner.take_snapshot(folder, 1)
        copies = Allocations().now - again
        del trainer
        gc.collect()
        return Held(rest - before, counted.peak - before, copies)
