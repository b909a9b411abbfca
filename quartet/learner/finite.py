"""Checks for NaN and infinity on all ranks: of gradients before a step, and of weights before they leave the
learner."""

from collections.abc import Iterable

import torch
from torch import nn

from quartet.learner.ema import local_share
from quartet.ranks.ranks import Ranks
from quartet.wire.errors import NotFinite


def agreed(fine: bool, ranks: Ranks, device: torch.device) -> bool:
    """True if `fine` is True on every rank. Every rank calls it."""
    if ranks.world_size == 1:
        return fine
    return float(ranks.sums(torch.tensor([float(not fine)], device=device))) == 0


def check_weights(module: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Raises NotFinite on all ranks unless every weight is finite. Every rank calls it and checks its own share:
    nothing is gathered, and each tensor is read once.
    """
    if not agreed(_all_finite(local_share(parameter) for parameter in module.parameters()), ranks, device):
        wrong = [name for name, parameter in module.named_parameters() if not _all_finite([local_share(parameter)])]
        where = f", here in {wrong[0]} and {len(wrong) - 1} more" if wrong else ", on another rank"
        raise NotFinite(f"weights are not finite{where}; they are not pushed, saved or kept")


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True if all numbers are finite. Minimum and maximum suffice: both are NaN if any number is."""
    ends: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            low, high = tensor.detach().aminmax()
            ends.setdefault(tensor.device, []).extend((low.float(), high.float()))
    return all(bool(torch.stack(extremes).isfinite().all()) for extremes in ends.values())
