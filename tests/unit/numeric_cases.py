"""Cases of the tests of numerics."""

import math

import torch

NAN, INF = math.nan, math.inf


SEEDS = range(5)


X = torch.tensor([[1.0, 2.0, NAN], [4.0, INF, -INF]])


M = torch.tensor([[True, True, False], [True, False, False]])


def response_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """True at the first lengths[b] of `width` positions. [B] -> [B, T] bool."""
    return torch.arange(width) < lengths.unsqueeze(1)
