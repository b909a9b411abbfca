"""Responses compared with the others to their prompt. Pure functions, no I/O.

Groups are told by their numbers, never by places in a batch, and may be of any sizes: a comparison does not change
with the order of the responses, nor with the other groups.
"""

import torch
from torch import Tensor

EPS = 1e-6  # added to a deviation


def compared(rewards: Tensor, groups: Tensor, *, leave_one_out: bool, divide: bool) -> Tensor:
    """Each response's reward less the mean of its group. rewards [B], groups int64 [B] -> [B].

    The mean is over all of the group (GRPO: Shao et al. 2024, arXiv:2402.03300), or over the others (`leave_one_out`:
    Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740). With `divide` the difference is divided by the unbiased
    deviation of the group's rewards + 1e-6; without it is Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783). A response
    alone in its group has nothing to be compared with, and gets 0, as do equal rewards.

    With R = 1, 2, 6 the mean is 3, the deviation 2.65: -2, -1, 3, or divided -0.76, -0.38, 1.13. The means of the
    others are 4, 3.5, 1.5: -3, -1.5, 4.5. ValueError unless both are [B].
    """
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards and groups must be [B], got {list(rewards.shape)} and {list(groups.shape)}")
    made = torch.zeros_like(rewards)
    for members in by_size(groups):
        own, size = rewards[members], members.shape[1]
        if size == 1:
            continue
        differs = own.amax(dim=1, keepdim=True) != own.amin(dim=1, keepdim=True)
        if leave_one_out:
            centred = own - (own.sum(dim=1, keepdim=True) - own) / (size - 1)
        else:
            centred = own - own.mean(dim=1, keepdim=True)
        if divide:
            centred = centred / (own.std(dim=1, keepdim=True) + EPS)
        # The mean of equal rewards may be one rounding away from them, which a division would make large.
        made[members] = torch.where(differs, centred, 0.0)
    return made


def by_size(groups: Tensor) -> list[Tensor]:
    """The places of the members of each group: for each size s that there is one tensor [n, s] of the n groups that
    have it, in the order of their numbers and, within a group, of their places. groups int64 [B]."""
    order = torch.argsort(groups, stable=True)
    _, counts = torch.unique(groups, return_counts=True)
    parts = order.split(counts.tolist())
    sizes = sorted({len(part) for part in parts})
    return [torch.stack([part for part in parts if len(part) == size]) for size in sizes]


def described(scores: Tensor, groups: Tensor) -> dict[str, float]:
    """Metrics of a batch's groups: `group/zero_variance`, the share of groups in which all scores are the same, and
    `group/spread`, the mean over groups of the unbiased deviation of their scores. scores, groups [B]."""
    equal, spreads = list[bool](), list[float]()
    for members in by_size(groups):
        own = scores[members].double()
        equal += (own.amax(dim=1) == own.amin(dim=1)).tolist()
        spreads += own.std(dim=1).tolist() if own.shape[1] > 1 else [0.0] * len(own)
    return {"group/zero_variance": sum(equal) / len(equal), "group/spread": sum(spreads) / len(spreads)}
