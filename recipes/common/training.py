"""The loop that every model of the recipes is trained with."""

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from recipes.common.schedule import Schedule

Batch = TypeVar("Batch")

THREADS = 2
"""Enough for models this small: more threads wait for one another longer than they work."""


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    schedule: Schedule,
) -> float:
    """Trains `model` by AdamW for one update per batch, `schedule.steps` at most; returns the last loss.

    `loss_of` gives a batch's loss as a scalar tensor. Gradients are clipped to norm 1. Raises ValueError
    without batches, and FloatingPointError at the first loss that is not finite.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.peak, weight_decay=0.01)
    loss = None
    for step, batch in zip(range(schedule.steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = loss_of(batch)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss at step {step} is {loss.item()}; a lower learning rate may help")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    if loss is None:
        raise ValueError("batches: at least one is needed to train on")
    return float(loss.detach())


def quiet_and_seeded(seed: int) -> None:
    """Fixes torch's seed and threads, and keeps transformers from drawing bars for files of a megabyte.

    If OMP_NUM_THREADS is set, torch's threads are left as it says.
    """
    torch.manual_seed(seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    logging.disable_progress_bar()
