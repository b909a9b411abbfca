"""Log-probs, entropy and attention at the sizes of PPO. Two minutes.

python -m benchmarks.gpu.kernels [--device cuda] [--positions 8192] [--vocabulary 151936] [--tokens 16384]
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.gpu.results import Cell, Results, seconds, wait
from quartet.models import numerics
from quartet.models.attention.packed import Pieces, packed_attention
from quartet.models.distribution import Distribution
from quartet.models.sequences import pad_pairs
from quartet.models.tiles import PLAIN, Kernels, linear_logprobs

HEADS, GROUPS, WIDTH = 12, 2, 128
"""Attention sizes of a model of 1.5B parameters."""
HIDDEN = HEADS * WIDTH


class Attention(nn.Module):
    """The attributes that transformers' attention function reads from its layer."""

    num_key_value_groups = HEADS // GROUPS
    is_causal = True


def main(
    device: str = "cuda",
    positions: int = 8192,
    vocabulary: int = 151_936,
    tokens: Annotated[int, typer.Option(help="of a packed row")] = 16_384,
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    where, results = torch.device(device), Results("kernels", out)
    _logprobs(results, where, positions, vocabulary)
    _in_head(results, where, positions, vocabulary)
    for count in (8, 64):
        _attention(results, where, tokens, count)
    _shared(results, where, tokens)
    results.show()


def _logprobs(results: Results, where: torch.device, positions: int, vocabulary: int) -> None:
    logits = torch.randn(1, positions, vocabulary, device=where, dtype=torch.bfloat16, requires_grad=True)
    ids = np.random.default_rng(0).integers(vocabulary, size=positions, dtype=np.int32)
    pairs, every = pad_pairs([ids[:1]], [ids], where), Distribution()

    def forward() -> torch.Tensor:
        return every.logprobs(logits, pairs)

    def both() -> None:
        forward().sum().backward()

    def entropy() -> torch.Tensor:
        with torch.no_grad():
            return every.with_entropy(logits, pairs)[1]

    kept = dict(numerics.CHUNK_ELEMENTS)
    for chunk in (2**24, 2**27, 2**30):
        numerics.CHUNK_ELEMENTS[where.type] = chunk
        for name, action in (("log-probs", forward), ("and backward", both), ("log-probs and entropy", entropy)):
            results.attempt(f"{name}, chunks of {chunk >> 20} Mi", partial(_timed, action, where))
    numerics.CHUNK_ELEMENTS.update(kept)


def _in_head(results: Results, where: torch.device, positions: int, vocabulary: int) -> None:
    """Log-probs by tiles of the vocabulary, the head's product included."""
    states, weight = (
        torch.randn(count, HIDDEN, device=where, dtype=torch.bfloat16, requires_grad=True)
        for count in (positions, vocabulary)
    )
    ids = torch.randint(vocabulary, (positions,), device=where)
    for kind, kernels in {"plain": PLAIN, "compiled": Kernels.compiled("inductor")}.items():

        def forward(kernels: Kernels = kernels) -> torch.Tensor:
            return linear_logprobs(states, weight, ids, kernels=kernels)

        def both(forward: Callable[[], torch.Tensor] = forward) -> None:
            forward().sum().backward()

        for name, action in (("log-probs in the head", forward), ("and backward", both)):
            results.attempt(f"{name}, {kind}", partial(_timed, action, where))


def _attention(results: Results, where: torch.device, tokens: int, count: int) -> None:
    """Forward and backward through one layer's attention, so many sequences of like length in a row."""
    length = tokens // count
    states, pieces = _states(tokens, where), Pieces((length,) * count)

    def packed() -> None:
        _attended(states, pieces).sum().backward()

    def padded() -> None:
        rows = (state.view(-1, count, length, WIDTH).transpose(0, 1) for state in states)
        nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).sum().backward()

    sides: dict[str, Callable[[], None]] = {"packed": packed, "padded": padded}
    for name, side in sides.items():
        results.attempt(f"attention, {count} x {length}: {name}", partial(_timed, side, where))


def _shared(results: Results, where: torch.device, tokens: int) -> None:
    """Eight responses and a prompt of four times their length: the prompt once, or with each response. And how far
    the former is from the same in float32, which another kernel computes."""
    length = tokens // 12
    once = Pieces((4 * length, *[length] * 8), (None, *[0] * 8))
    for name, pieces in {"prompt once": once, "prompt with each": Pieces((5 * length,) * 8)}.items():
        states = _states(sum(pieces.lengths), where)

        def side(states: Sequence[torch.Tensor] = states, pieces: Pieces = pieces) -> None:
            _attended(states, pieces).sum().backward()

        results.attempt(f"attention, 8 responses: {name}", partial(_timed, side, where))

    def compared() -> dict[str, Cell]:
        states = _states(sum(once.lengths), where)
        wide = [state.detach().float().requires_grad_() for state in states]
        sides = []
        for each in (states, wide):
            output = _attended(each, once).float()
            sides.append([output.detach(), *torch.autograd.grad(output.square().sum(), each)])
        furthest = [float((one - other).norm() / other.norm()) for one, other in zip(*sides, strict=True)]
        return dict(zip(("output", "query", "key", "value"), furthest, strict=True))

    results.attempt("distance from float32, relative", compared)


def _states(tokens: int, where: torch.device) -> list[torch.Tensor]:
    """Query, key and value of a row."""
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, device=where, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _attended(states: Sequence[torch.Tensor], pieces: Pieces) -> torch.Tensor:
    query, key, value = states
    queries, keys = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
        for lengths in (pieces.lengths, pieces.reaches)
    )
    return packed_attention(
        Attention(), query, key, value, None, packed_pieces=pieces, cu_seq_lens_q=queries, cu_seq_lens_k=keys
    )[0]


def _timed(action: Callable[[], object], where: torch.device) -> dict[str, Cell]:
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
    took = seconds(action, where, rounds=5)
    wait(where)
    peak = (torch.cuda.max_memory_allocated(where) - before) / 2**30 if where.type == "cuda" else 0.0
    return {"ms": took * 1e3, "peak_gib": peak}


if __name__ == "__main__":
    typer.run(main)
