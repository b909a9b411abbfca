"""Products of linear layers in float32 by oneDNN over the same by torch's own library, in turns on one core.

    python -m benchmarks.products [--rounds 30]

Prints for each shape the ratio of the least times: of the layer itself, and of its input's gradient.
`quartet/models/linear.py` computes both by oneDNN on AMD's processors, if they are large enough.
"""

import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console

from quartet.models.linear import LEAST_PRODUCTS, multiply

CONSOLE = Console()
SHAPES = (
    (64, 128, 128),
    (864, 64, 64),
    (768, 128, 384),
    (768, 384, 128),
    (256, 512, 512),
    (864, 512, 1536),
    (864, 1536, 512),
    (512, 1024, 4096),
    (512, 4096, 1024),
)
"""Rows, inputs and outputs of a layer."""


def main(rounds: Annotated[int, typer.Option(min=1)] = 30) -> None:
    """Measures all shapes."""
    torch.set_num_threads(1)
    for rows, inputs, outputs in SHAPES:
        given, weight, gradient = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
        layer = ratio(lambda: multiply(given, weight, None), lambda: given @ weight.t(), rounds)  # noqa: B023
        back = ratio(lambda: multiply(gradient, weight.t(), None), lambda: gradient @ weight, rounds)  # noqa: B023
        used = rows * inputs * outputs >= LEAST_PRODUCTS
        told = f"{rows} x {inputs} -> {outputs}: layer {layer:.2f}, gradient {back:.2f}"
        CONSOLE.print(told + ("" if used else " (too small, torch's is used)"), highlight=False)


def ratio(one: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor], rounds: int) -> float:
    """The least time of one side over that of the other, measured in turns."""
    least = [float("inf")] * 2
    for _ in range(rounds):
        for side, compute in enumerate((one, other)):
            start = time.perf_counter()
            compute()
            least[side] = min(least[side], time.perf_counter() - start)
    return least[0] / least[1]


if __name__ == "__main__":
    typer.run(main)
