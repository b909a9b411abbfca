"""Token lists of different lengths as one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.common.tokenizer import PAD_ID


def pad_right(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads N sequences to the longest: ids [N, T] int64, mask [N, T] int64 with 1 on every given token.

    The mask comes from the lengths, since a policy may well emit the padding token itself.
    """
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids, mask
