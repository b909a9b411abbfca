"""The command line that every recipe has."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from quartet.config.base import IDLE_THREADS_SLEEP

LARGEST_SEED = 2**32 - 1
"""Largest seed of the trainings that make the models."""

Make = Callable[[Path, int, Console], bool]
"""A recipe: fills a folder for a seed, reports to a console, and says whether there was anything to do."""


def run(recipe: str, make: Make, arguments: Sequence[str] | None = None) -> None:
    """Calls `make` as `--out` and `--seed` say. A bad argument or a full disk ends the program with status 2, Ctrl-C
    with 130; what was there before is then still there."""
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.{recipe}", description=f"Makes the models and prompts of {recipe}."
    )
    parser.add_argument("--out", type=Path, default=Path("models") / recipe, help="folder to write to")
    parser.add_argument("--seed", type=_seed, default=0, help=f"seed of all that is made, up to {LARGEST_SEED}")
    chosen = parser.parse_args(arguments)
    os.environ |= IDLE_THREADS_SLEEP | os.environ
    try:
        make(chosen.out, chosen.seed, Console(highlight=False, markup=False, soft_wrap=True))
    except OSError as error:
        parser.error(str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; the same command begins again", file=sys.stderr)
        sys.exit(130)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {LARGEST_SEED}")
    return int(text)
