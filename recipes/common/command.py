"""The command line that every recipe has."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Lets an idle thread sleep: on cores that others use too, spinning ones slow training down several times.

Read when torch is first imported, so set before that.
"""


def run(
    recipe: str, make: Callable[[Path, int, Console], bool], arguments: Sequence[str] | None = None
) -> None:
    """Reads `--out` and `--seed` and calls `make(out, seed, console)`; a bad argument ends the program with 2."""
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.{recipe}", description=f"Makes the models and prompts of the recipe {recipe}."
    )
    parser.add_argument("--out", type=Path, default=Path("models") / recipe, help="folder to write to")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of split, data and weights, from 0 up")
    chosen = parser.parse_args(arguments)
    os.environ.update(PATIENT | os.environ)
    try:
        make(chosen.out, chosen.seed, Console())
    except FileExistsError as error:
        parser.error(str(error))


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; name a whole number from 0 up")
    return seed
