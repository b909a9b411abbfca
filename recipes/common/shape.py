"""The size of a tiny Llama."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Width, depth and attention heads; the feed-forward layers are three times as wide.

    vLLM on CPU runs only some head sizes (`hidden / heads`); 32 is the smallest.
    """

    hidden: int = 128
    layers: int = 2
    heads: int = 4
