"""Loads a policy's adapters into vLLM, which computes with them beside the weights that the model was loaded with.

vLLM is made for adapters of many users, from folders. Here they are of one policy, and come with each push: they are
loaded from memory while the engine is paused, in the place of those before, or of the oldest of several versions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quartet.seams.vllm import keep_adapters, load_adapters
from quartet.weight_transfer.manifest import Manifest
from services.rollout.vllm.loading import Received


class Adapters:
    """The adapters of one worker's model."""

    def __init__(
        self, runner: Any, rank: int, shapes: Mapping[str, Sequence[int]], versions: int, device: torch.device
    ) -> None:
        """Begins with zeros, with which the model computes as its own weights alone do.

        Args:
            runner: the worker's model runner.
            rank: the adapters' rank.
            shapes: name -> shape of each A and B.
            versions: number of versions that requests are computed with at a time.
            device: the model's device.
        """
        self._runner, self._rank, self._device = runner, rank, device
        self._versions, self.place = versions, 0
        """Place of the next push's adapters, from 0; with several versions, one that no request is computed with."""
        self._broken = False
        """True if loading ended before the only adapters were complete."""
        keep_adapters(runner)
        zeros = {name: torch.zeros(*shape) for name, shape in shapes.items()}
        self.stale = load_adapters(runner, zeros, rank, self.place)
        """Layers that have no place for the adapters of the last update."""

    def pieces(self, manifest: Manifest) -> None:
        """Says that vLLM divides adapters while it loads them: it needs them whole."""

    def replace(self, manifest: Manifest, received: Received) -> None:
        """Loads all adapters. RuntimeError if they changed while they were loaded; they then need a further push."""
        self._broken = self._versions == 1
        tensors = {name: tensor for bucket, data in received.buckets() for name, tensor in manifest.cut(bucket, data)}
        self.stale = load_adapters(self._runner, tensors, self._rank, self.place)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        received.check()
        self._broken = False

    def discard(self) -> bool:
        """Ends a push without its adapters; True if the model still has its old ones."""
        return not self._broken
