"""The loop that every model of the recipes is trained with."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from recipes.common.schedule import Schedule

Batch = TypeVar("Batch")


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    schedule: Schedule,
) -> float:
    """Trains `model` by AdamW for one update per batch, `schedule.steps` at most; returns the last loss.

    `loss_of` gives a batch's loss as a scalar tensor. Gradients are clipped to norm 1. Raises ValueError when
    there is no batch, and FloatingPointError at the first loss that is not finite.
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
