"""The running mean of weights, on its own; test_snapshot and test_lora have it in a learner."""

import torch
from torch import nn

from quartet.learner.ema import local_share


def partition(numbers: list[float], rank: int, count: int) -> nn.Parameter:
    """A parameter of `count` numbers as DeepSpeed leaves it at ZeRO 3: this rank's partition, with its padding."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_tensor, parameter.ds_numel = torch.tensor(numbers), count  # type: ignore[attr-defined]
    parameter.ds_zero_partition_rank = rank  # type: ignore[attr-defined]
    return parameter


def test_padding_belongs_to_no_share() -> None:
    nan = float("nan")
    five = [partition([1, 2], 0, 5), partition([3, 4], 1, 5), partition([5, nan], 2, 5)]  # over three ranks
    one = [partition([1], 0, 1), partition([nan], 1, 1)]
    assert [local_share(parameter).tolist() for parameter in five + one] == [[1, 2], [3, 4], [5], [1], []]
    whole = nn.Parameter(torch.ones(2, 3))
    assert local_share(whole).shape == (2, 3)
