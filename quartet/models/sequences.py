"""Prompts and responses of any lengths as the tensors that models take: padded, or packed into one row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from quartet.columns import Columns
from quartet.models.attention.packed import Pieces
from quartet.models.attention.padded import whole_mask
from quartet.models.device import on_device
from quartet.models.runs import even_runs
from quartet.models.sharing import held, sharing
from quartet.wire.codec import Ints

Batches = Callable[[Sequence[Ints], Sequence[Ints], int], Iterator[list[int]]]
"""Divides prompts and responses into batches of at most that many tokens; yields the indices of each batch."""

MOST_PADDING = 1 / 8
"""Largest share of padding in a batch that has enough tokens to be efficient without it."""
_ENOUGH_TOKENS = {"cpu": 256, "cuda": 4096}


def enough_tokens(device: torch.device) -> int:
    """Tokens from which on a pass is about as efficient as a larger one: on a core, passes of 392 tokens or more
    reach 0.88 of the best rate. The number for GPUs is a guess that was not measured."""
    return _ENOUGH_TOKENS.get(device.type, _ENOUGH_TOKENS["cuda"])


@dataclass(frozen=True, slots=True)
class PairTensors:
    """B pairs in R rows of L columns. C columns hold a response token in some row.

    Padded (`pad_pairs`): R = B, prompts padded on the left to P and responses on the right to T, so that all
    responses start in the same column; L = P + T and C = T. Packed (`concatenate_pairs`): R = 1, the pairs one after
    another, but a prompt that several share is there once; L is the number of tokens and C that of the responses'.
    Both can leave out the last token of each response, from which nothing in it is predicted; C stays as it is.
    """

    input_ids: torch.Tensor
    """[R, L] int64"""
    attention_mask: torch.Tensor | None
    """[R, L] int64, 1 on tokens; packed: None. `whole_mask` if nothing is padded."""
    position_ids: torch.Tensor
    """[R, L] int64, 0 at each prompt's first token"""
    predictors: torch.Tensor
    """[C] int64, the column of the token before each response token; before the first one it is its prompt's last"""
    response_ids: torch.Tensor
    """[R, C] int64, 0 at padding"""
    action_mask: torch.Tensor
    """[R, C] bool, True on response tokens; made from lengths, so a sampled pad token counts as one"""
    lengths: tuple[int, ...]
    """Response lengths."""
    steps: torch.Tensor
    """[1, C] int64: the index, from 0, of a column's token in its response."""
    turn_steps: torch.Tensor | None = None
    """[R, C] int64: the index, from 0, of a sampled token in its segment, where responses have several; None: as
    `steps`."""
    tokens: torch.Tensor | None = None
    """[C] int64, the column of each response token; None if the last ones were left out."""
    ends: torch.Tensor | None = None
    """Packed: [B] int64, the column of each pair's last token; None if that was left out."""
    pieces: Pieces | None = None
    """Packed: the pieces of the row."""
    boundaries: torch.Tensor | None = None
    """Packed: [N + 1] int32, the columns at which the N pieces begin, then the end of the last one."""
    reaches: torch.Tensor | None = None
    """Packed: [N + 1] int32, the same of the tokens that the pieces reach, end to end."""
    repeated: bool = False
    """True if one column may predict the first tokens of several responses, which share a prompt."""

    @property
    def width(self) -> int:
        """C."""
        return int(self.action_mask.shape[1])

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments for a transformers model. Those for packed rows have the names of its FlashAttention, but for the
        one that `packed_attention` alone reads."""
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        if self.pieces is not None:
            # What the host knows already: otherwise each layer would wait for the device.
            inputs |= {"cu_seq_lens_q": self.boundaries, "cu_seq_lens_k": self.reaches, "packed_pieces": self.pieces}
            inputs |= {"max_length_q": max(self.pieces.lengths), "max_length_k": max(self.pieces.reaches)}
        return inputs

    def trained(self, rows: Sequence[np.ndarray] | None, *, counts: bool = True) -> torch.Tensor:
        """[R, C] bool, the mask of a loss: True at the response tokens that `rows`, B boolean arrays, mark, at all of
        them if it is None. All False unless the pairs count: every sum over them, and its gradient, is then zero."""
        if not counts:
            return torch.zeros_like(self.action_mask)
        return self.action_mask if rows is None else self.spread(rows).bool()

    def spread(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        """[R, C] float32 from a value for each response token, B arrays; zeros at padding."""
        device = self.action_mask.device
        if self.pieces is None:
            return pad_rows(rows, self.width, device)
        return on_device(np.concatenate(rows).astype(np.float32), device)[None]

    def unpad(self, values: torch.Tensor) -> list[np.ndarray]:
        """The entries of `values` [R, C] at response tokens, as B float32 arrays."""
        # One copy to the host, which knows where the tokens are; the device would have to be asked how many they are.
        held = values.detach().to("cpu", torch.float32).numpy()
        rows = held if self.pieces is None else np.split(held[0], np.cumsum(self.lengths)[:-1])
        return [row[:length].copy() for row, length in zip(rows, self.lengths, strict=True)]


def pair_tensors(
    trajectories: Columns, device: torch.device, *, packing: bool, last: bool, shared: bool = True
) -> PairTensors:
    """Packs trajectories of one sequence each, prompts `shared` where that gains, or else pads them, each as a prompt
    with what follows it; with the index of each sampled token in its segment, if there are several. ValueError if one
    is several sequences (see `Columns.apart`)."""
    if trajectories.begins is not None:
        raise ValueError("a model takes sequences, and some of these trajectories are several: take them apart")
    prompts, responses, steps = list(trajectories.prompts), list(trajectories.responses), trajectories.turn_steps
    if packing:
        pairs = concatenate_pairs(prompts, responses, device, last=last, shared=shared)
    else:
        pairs = pad_pairs(prompts, responses, device, last=last)
    return pairs if steps is None else replace(pairs, turn_steps=pairs.spread(steps).long())


def pad_pairs(
    prompts: Sequence[Ints], responses: Sequence[Ints], device: torch.device | str = "cpu", *, last: bool = True
) -> PairTensors:
    """Pads B pairs. The padding has id 0 and is masked out. Without `last` the model does not see the last token of
    each response."""
    seen = _seen(responses, last)
    wide_p, wide_t = _longest(prompts), _longest(responses)
    input_ids = np.zeros((len(prompts), wide_p + _longest(seen)), np.int32)
    attention, response_ids = np.zeros_like(input_ids), np.zeros((len(prompts), wide_t), np.int32)
    for row, (prompt, begun, response) in enumerate(zip(prompts, seen, responses, strict=True)):
        tokens = slice(wide_p - len(prompt), wide_p + len(begun))
        input_ids[row, tokens] = np.concatenate([prompt, begun])
        attention[row, tokens] = 1
        response_ids[row, : len(response)] = response
    positions = np.maximum(attention.cumsum(1, np.int32) - 1, 0)
    lengths = tuple(len(response) for response in responses)
    predictors = torch.arange(wide_p - 1, wide_p + wide_t - 1, device=device)
    return PairTensors(
        input_ids=on_device(input_ids, device, torch.int64),
        attention_mask=whole_mask(attention.shape, device)
        if attention.all()
        else on_device(attention, device, torch.int64),
        position_ids=on_device(positions, device, torch.int64),
        predictors=predictors,
        response_ids=on_device(response_ids, device, torch.int64),
        action_mask=on_device(np.arange(wide_t) < np.asarray(lengths)[:, None], device),
        lengths=lengths,
        steps=torch.arange(wide_t, device=device)[None],
        tokens=predictors + 1 if last else None,
    )


def concatenate_pairs(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    device: torch.device | str = "cpu",
    *,
    last: bool = True,
    shared: bool = True,
) -> PairTensors:
    """Packs B pairs into one row. The model's attention has to keep them apart (`packed_attention` does).

    First come the pairs that have their prompt for themselves and each shared prompt, in the order of the pairs;
    then, in the order of their length, the responses to shared prompts. Their positions go on from the prompt's.

    Args:
        prompts: token ids, each [P].
        responses: token ids, each [T].
        device: the tensors' device.
        last: False leaves out the last token of each response.
        shared: True puts a prompt of several pairs there once where that gains (`sharing`); False never does.
    """
    seen, count = _seen(responses, last), len(prompts)
    groups = sharing(prompts, responses) if shared else [[pair] for pair in range(count)]
    parts: list[Ints] = []
    behind: list[int | None] = []
    prompt_ends, begins, continued, column = [0] * count, [0] * count, [0] * count, 0
    for group in groups:
        first, alone = group[0], len(group) == 1
        for pair in group:
            prompt_ends[pair] = column + len(prompts[first]) - 1
            begins[pair], continued[pair] = column + len(prompts[first]), len(parts)
        parts.append(np.concatenate([prompts[first], seen[first]]) if alone else prompts[first])
        behind.append(None)
        column += len(parts[-1])
    rests = [pair for group in groups if len(group) > 1 for pair in group if len(seen[pair])]
    for pair in sorted(rests, key=lambda pair: (len(prompts[pair]), len(seen[pair]))):
        begins[pair] = column
        parts.append(seen[pair])
        behind.append(continued[pair])
        column += len(seen[pair])
    pieces = Pieces([len(part) for part in parts], behind)
    starts = [reach - length for reach, length in zip(pieces.reaches, pieces.lengths, strict=True)]
    lengths = tuple(len(response) for response in responses)
    predictors, tokens = _counted([begin - 1 for begin in begins], lengths), _counted(begins, lengths)
    # The first token of a response is predicted at its prompt's last one, wherever the response lies.
    firsts = np.cumsum([0, *lengths])[:-1]
    some = [pair for pair in range(count) if lengths[pair]]
    predictors[firsts[some]] = [prompt_ends[pair] for pair in some]
    ends = [b + len(s) - 1 if len(s) else p for b, s, p in zip(begins, seen, prompt_ends, strict=True)]
    boundaries = _boundaries(pieces.lengths, device)
    return PairTensors(
        input_ids=on_device(np.concatenate(parts).astype(np.int32), device, torch.int64)[None],
        attention_mask=None,
        position_ids=on_device(_counted(starts, pieces.lengths), device, torch.int64)[None],
        predictors=on_device(predictors, device, torch.int64),
        response_ids=on_device(np.concatenate(responses).astype(np.int32), device, torch.int64)[None],
        action_mask=torch.ones((1, len(predictors)), dtype=torch.bool, device=device),
        lengths=lengths,
        steps=on_device(_counted([0] * count, lengths), device, torch.int64)[None],
        tokens=on_device(tokens, device, torch.int64) if last else None,
        ends=on_device(np.asarray(ends, np.int32), device, torch.int64) if last else None,
        pieces=pieces,
        boundaries=boundaries,
        # Never the same tensor: layers are compiled for two, or for one that is both.
        reaches=_boundaries(pieces.reaches, device) if pieces.shared else boundaries.clone(),
        repeated=len(groups) < count,
    )


def _boundaries(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """[N + 1] int32, where each of N parts of such lengths begins, then the end of the last one."""
    return on_device(np.asarray([0, *accumulate(lengths)], np.int32), device)


def _seen(responses: Sequence[Ints], last: bool) -> Sequence[Ints]:
    return responses if last else [response[:-1] for response in responses]


def _longest(rows: Sequence[Ints]) -> int:
    return max(len(row) for row in rows)


def _counted(starts: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """Consecutive numbers from each start on, as many as its length, all end to end."""
    counted = [
        np.arange(start, start + length, dtype=np.int32) for start, length in zip(starts, lengths, strict=True)
    ]
    return np.concatenate(counted)


def pad_rows(rows: Sequence[np.ndarray], width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[B, width] float32 from B rows of at most `width` values, zeros on the right."""
    padded = np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return on_device(padded, device)


def length_batches(
    prompts: Sequence[Ints], responses: Sequence[Ints], max_tokens: int, enough: int | None = None
) -> Iterator[list[int]]:
    """Indices of pairs of similar length, batch by batch, each of at most `max_tokens` after padding.

    A single pair that is longer makes a batch of its own. A batch with `enough` tokens ends where one more pair would
    make more than MOST_PADDING of it padding; without `enough` padding ends none.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(responses[i]), len(prompts[i])))
    batch: list[int] = []
    wide_p = wide_t = tokens = 0
    for index in order:
        length = len(prompts[index]) + len(responses[index])
        next_p, next_t = max(wide_p, len(prompts[index])), max(wide_t, len(responses[index]))
        padded = (len(batch) + 1) * (next_p + next_t)
        wasteful = enough is not None and tokens >= enough and tokens + length < (1 - MOST_PADDING) * padded
        if batch and (padded > max_tokens or wasteful):
            yield batch
            batch, tokens, next_p, next_t = [], 0, len(prompts[index]), len(responses[index])
        batch.append(index)
        tokens += length
        wide_p, wide_t = next_p, next_t
    if batch:
        yield batch


def packed_batches(
    prompts: Sequence[Ints], responses: Sequence[Ints], max_tokens: int, *, shared: bool = False
) -> Iterator[list[int]]:
    """Indices of pairs, batch by batch, each of at most `max_tokens` without padding, in the order of their length:
    attention's cost grows with length, and similar lengths give batches of similar memory. As few batches as that
    takes, of about as many tokens each: a small one at the end would cost a GPU nearly as much time as a large one.

    A single pair that is longer makes a batch of its own. With `shared` a prompt that several pairs share counts once
    (`held`), and these stay together, in as many batches as they need.
    """
    groups = sharing(prompts, responses) if shared else [[pair] for pair in range(len(prompts))]
    groups.sort(key=lambda group: len(prompts[group[0]]) + max(len(responses[pair]) for pair in group))
    parts: list[tuple[list[int], int]] = []
    for group in groups:
        parts += _parts(len(prompts[group[0]]), group, [len(responses[pair]) for pair in group], max_tokens)
    for run in even_runs(parts, itemgetter(1), max_tokens):
        yield [pair for part, _ in run for pair in part]


def _parts(prompt: int, group: list[int], lengths: list[int], most: int) -> Iterator[tuple[list[int], int]]:
    """The pairs of a prompt of so many tokens with responses of these lengths, and the tokens that they hold: all
    together, or in parts of `most` tokens, each with a copy of the prompt."""
    part: list[int] = []
    total = 0
    # Few pairs may hold more than many, as a prompt is computed once only where that is less.
    if (whole := held(prompt, len(group), sum(lengths))) <= most:
        yield group, whole
        return
    for pair, length in zip(group, lengths, strict=True):
        if part and held(prompt, len(part) + 1, total + length) > most:
            yield part, held(prompt, len(part), total)
            part, total = [], 0
        part.append(pair)
        total += length
    yield part, held(prompt, len(part), total)
