"""Tokens per second of forward passes of various sizes on one core, relative to the most efficient one.

    python -m benchmarks.pass_size [--rounds 5]

A model with the sizes of `benchmarks.vs_trl`'s case `20M-uneven`, and pairs of 12 and 37 tokens, the mean there. All
sizes take turns in each round; printed are the medians of their ratios to the best of the round.
"""

import time
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.vs_trl.cases import CASES
from services.common.models.sequences import pad_pairs

PAIRS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, RESPONSE = np.full(12, 5, np.int32), np.full(37, 6, np.int32)


def main(rounds: Annotated[int, typer.Option(min=1)] = 5) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(**CASES["20M-uneven"].shape())).eval()
    speeds = [[speed(model, pairs) for pairs in PAIRS] for _ in range(rounds + 1)][1:]  # the first warms up
    table = Table("pairs", "tokens", "tokens/s over the best")
    for index, pairs in enumerate(PAIRS):
        ratio = median(each[index] / max(each) for each in speeds)
        table.add_row(str(pairs), str(pairs * (len(PROMPT) + len(RESPONSE))), f"{ratio:.2f}")
    Console().print(table)


@torch.inference_mode()
def speed(model: torch.nn.Module, pairs: int) -> float:
    """Tokens per second of one pass of so many pairs."""
    tensors = pad_pairs([PROMPT] * pairs, [RESPONSE] * pairs)
    began = time.perf_counter()
    model(**tensors.inputs, use_cache=False)
    seconds = time.perf_counter() - began
    return pairs * (len(PROMPT) + len(RESPONSE)) / seconds


if __name__ == "__main__":
    typer.run(main)
