"""Prompts and responses of any lengths as the padded tensors that models take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.common.arrays import Ints
from services.common.numerics import response_mask


@dataclass(frozen=True, slots=True)
class PaddedPairs:
    """B pairs, prompts padded on the left to P and responses on the right to T, so that all responses start
    in the same column and one slice holds them."""

    input_ids: torch.Tensor
    """[B, P + T] int64"""
    attention_mask: torch.Tensor
    """[B, P + T] int64, 1 on tokens"""
    position_ids: torch.Tensor
    """[B, P + T] int64, 0 at each prompt's first token"""
    action_mask: torch.Tensor
    """[B, T] bool, True on response tokens; made from lengths, so a sampled pad token counts as one"""
    lengths: tuple[int, ...]
    """Response lengths."""

    @property
    def width(self) -> int:
        """T."""
        return int(self.action_mask.shape[1])

    @property
    def response_ids(self) -> torch.Tensor:
        """[B, T] int64."""
        return self.input_ids[:, -self.width :]

    def muted(self) -> "PaddedPairs":
        """The same pairs with no token that counts: every masked sum over them, and its gradient, is zero."""
        return replace(self, action_mask=torch.zeros_like(self.action_mask))

    def unpad(self, values: torch.Tensor) -> list[np.ndarray]:
        """Rows of `values` ([B, T]) without their padding, as float32 arrays."""
        rows = values.detach().float().cpu().numpy()
        return [row[:length] for row, length in zip(rows, self.lengths, strict=True)]


def pad_pairs(prompts: Sequence[Ints], responses: Sequence[Ints], device: torch.device | str = "cpu") -> PaddedPairs:
    """Pads B pairs. The padding's id is 0 and means nothing: it is masked out."""
    wide_p = max(len(prompt) for prompt in prompts)
    wide_t = max(len(response) for response in responses)
    input_ids = np.zeros((len(prompts), wide_p + wide_t), np.int64)
    attention = np.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = slice(wide_p - len(prompt), wide_p + len(response))
        input_ids[row, tokens] = np.concatenate([prompt, response])
        attention[row, tokens] = 1
    positions = np.maximum(attention.cumsum(1) - 1, 0)
    lengths = tuple(len(response) for response in responses)
    return PaddedPairs(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(attention).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        action_mask=response_mask(torch.tensor(lengths), wide_t).to(device),
        lengths=lengths,
    )


def pad_rows(rows: Sequence[np.ndarray], width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[B, width] float32 from B rows of at most `width` values, zeros on the right."""
    padded = np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded).to(device)


def length_batches(prompts: Sequence[Ints], responses: Sequence[Ints], max_tokens: int) -> Iterator[list[int]]:
    """Indices of pairs of like length, batch by batch, each of at most `max_tokens` after padding.

    A single pair that is longer makes a batch of its own.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(responses[i]), len(prompts[i])))
    batch: list[int] = []
    wide_p = wide_t = 0
    for index in order:
        next_p, next_t = max(wide_p, len(prompts[index])), max(wide_t, len(responses[index]))
        if batch and (len(batch) + 1) * (next_p + next_t) > max_tokens:
            yield batch
            batch, next_p, next_t = [], len(prompts[index]), len(responses[index])
        batch.append(index)
        wide_p, wide_t = next_p, next_t
    if batch:
        yield batch
