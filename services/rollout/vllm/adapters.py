"""Loads a policy's adapters into vLLM, which computes with them beside the weights that the model was loaded with.

vLLM is made for adapters of many users, from folders. Here there is one, which comes with each push: it is loaded
from memory while the engine is paused, in the place of the one before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quartet.seams.vllm import keep_adapters, load_adapters
from quartet.weight_transfer.manifest import Manifest


class Adapters:
    """The adapters of one worker's model."""

    def __init__(self, runner: Any, rank: int, shapes: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """Begins with zeros, with which the model computes as its own weights alone do.

        Args:
            runner: the worker's model runner.
            rank: the adapters' rank.
            shapes: name -> shape of each A and B.
            device: the model's device.
        """
        self._runner, self._rank, self._device = runner, rank, device
        self.broken = False
        """True if loading ended before the adapters were complete."""
        keep_adapters(runner)
        zeros = {name: torch.zeros(*shape) for name, shape in shapes.items()}
        self.stale = load_adapters(runner, zeros, rank)
        """Layers that have no place for the adapters of the last update."""

    def replace(
        self, manifest: Manifest, buckets: Callable[[], Iterable[tuple[range, Tensor]]], check: Callable[[], None]
    ) -> None:
        """Loads all adapters. `buckets` gives them, and `check` raises if they changed while they were loaded; they
        then need a further push."""
        self.broken = True
        received = {name: tensor for bucket, data in buckets() for name, tensor in manifest.cut(bucket, data)}
        self.stale = load_adapters(self._runner, received, self._rank)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        check()
        self.broken = False

    def discard(self) -> bool:
        """Ends a push without its adapters; True if the model still has its old ones."""
        return not self.broken
