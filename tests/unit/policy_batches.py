"""Helpers that make a policy trainer and batches for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution

TEMPERATURE = 0.7


def make_trainer(
    folder: Path,
    *,
    micro_batch_tokens: int = 10_000,
    rate: float = 1.0,
    epochs: int = 1,
    size: int = 4,
    packing: bool = False,
    **algorithm: Any,
) -> PolicyTrainer:
    """AdamW whose epsilon dwarfs the gradient: its first step is `rate` times the gradient."""
    optimizer = OptimizerConfig(learning_rate=rate * 1e5, eps=1e5, max_grad_norm=1e9)
    config = PolicyConfig(
        model=str(folder),
        optimizer=optimizer,
        micro_batch_tokens=micro_batch_tokens,
        packing=packing,
    )
    return PolicyTrainer(config, PPO(epochs=epochs, minibatch_size=size, **algorithm), Distribution(TEMPERATURE))


def noisy(rows: Sequence[torch.Tensor], scale: float, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [row.detach() + scale * torch.randn(row.shape, generator=draw) for row in rows]


def weights(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([tensor.detach().view(-1) for _, tensor in trainer.learner.full_weights()])
