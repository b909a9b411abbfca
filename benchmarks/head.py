"""Log-probs inside the head, a tile of the vocabulary at a time, over those from whole logits, taking turns.

    python -m benchmarks.head [--rounds 7] [--largest 151936]

Prints for each head the ratio of the least times on one core, of the forward pass alone and with the backward pass,
without and with the entropy; and the most memory that either side holds beside states, weights and their gradients.
Learner and reference compute log-probs inside the head (`quartet/models/tiles.py`), but for heads that are
divided among ranks, for instance.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.products import ratio
from quartet.models.distribution import Distribution
from quartet.models.sequences import concatenate_pairs
from quartet.models.tiles import Softmax, linear_logprobs

CONSOLE = Console()
HEADS = ((2048, 512, 4096), (2048, 512, 32_000), (512, 896, 151_936))
"""Positions, width and vocabulary."""


def main(rounds: Annotated[int, typer.Option(min=1)] = 7, largest: int = 151_936) -> None:
    """Measures all heads up to the largest vocabulary, in float32 and bfloat16."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for positions, width, vocabulary in HEADS:
            if vocabulary <= largest:
                told = [_compared(positions, width, vocabulary, dtype, entropy, rounds) for entropy in (False, True)]
                name = f"{positions} x {width} x {vocabulary}, {str(dtype).removeprefix('torch.')}"
                CONSOLE.print(f"{name}: {told[0]}; with entropy {told[1]}", highlight=False)


def _compared(positions: int, width: int, vocabulary: int, dtype: torch.dtype, entropy: bool, rounds: int) -> str:
    torch.manual_seed(0)
    states = torch.randn(1, positions, width, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) / width**0.5).to(dtype).requires_grad_()
    ids = np.random.default_rng(0).integers(0, vocabulary, positions).astype(np.int32)
    pairs = concatenate_pairs([ids[:1]], [ids], last=False)
    distribution = Distribution(0.9)

    def tiles() -> torch.Tensor:
        return linear_logprobs(states, weight, pairs.response_ids, Softmax(0.9), entropy=entropy).sum()

    def whole() -> torch.Tensor:
        logits = torch.nn.functional.linear(states, weight)
        if not entropy:
            return distribution.logprobs(logits, pairs).sum()
        return torch.stack(distribution.with_entropy(logits, pairs)).sum()

    def both(side: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(side(), [states, weight])

    with torch.no_grad():
        forward = ratio(tiles, whole, rounds)
    passes = ratio(both(tiles), both(whole), rounds)
    most = " and ".join(f"{_largest(both(side)) >> 20}" for side in (tiles, whole))
    return f"forward {forward:.2f}, both passes {passes:.2f}, largest tensor {most} MiB"


class _Sizes(TorchDispatchMode):
    largest: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [each.numel() * each.element_size() for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return made


def _largest(action: Callable[[], object]) -> int:
    """Bytes of the largest tensor that an operator returned meanwhile, the weight's gradient included."""
    with _Sizes() as sizes:
        action()
    return int(sizes.largest)


if __name__ == "__main__":
    typer.run(main)
