"""Loads new weights into vLLM's model, layer by layer at first, and keeps track of whether the model is complete."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from quartet.seams import vllm
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.pieces import Pieces
from services.rollout.vllm.destinations import Destinations, Watch


class Received(Protocol):
    """The weights that a push has brought, in memory of the host or the model's GPU."""

    def buckets(self) -> Iterable[tuple[range, Tensor]]:
        """All buckets in order: the numbers of their tensors in the manifest, and their bytes."""

    def weights(self, pieces: Pieces) -> Iterable[tuple[str, Sequence[Tensor]]]:
        """These pieces of each weight."""

    def check(self) -> None:
        """Raises RuntimeError if they changed since they were received."""


class Loading:
    """Opens a model's layers, loads complete sets of weights into them and closes them again.

    Graphs and kernels refer to the model's memory, so vLLM loads each layer elsewhere and copies it into place.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
        self._model: Any = model
        self._config = model_config
        self._device = device
        self.broken = False
        """True if loading ended before the layers were closed: the weights are a mixture of two versions."""
        self._packed: dict[Any, Any] = {}
        """The packed copies that the layers computed with, while the layers are open."""
        self._kernels: dict[Any, Any] = {}
        """The kernels of mixtures of experts by the method that runs them, while the layers are open."""
        self.stale: list[str] = []
        """Layers that the last update brought no weights for, not even shared ones."""
        self._layout: Any = None
        """The layout of the weights of which it is known whether they can be copied straight into place."""
        self._destinations: Destinations | None = None
        """The places of weights of that layout, if they can."""

    def pieces(self, manifest: Manifest) -> Pieces | None:
        """The pieces of such weights that are copied straight into place. None if they are loaded layer by layer."""
        found = self._straight(manifest)
        return None if found is None else found.pieces

    def replace(self, manifest: Manifest, received: Received) -> None:
        """Loads a complete set of weights of this layout: layer by layer, or straight into place where the first load
        of such weights has shown where that is. RuntimeError if they changed while they were loaded; the model then
        needs a further push."""
        if (found := self._straight(manifest)) is not None:
            self.broken = True
            found.fill(received.weights(found.pieces))
            self._wait()
            received.check()
            self.broken = False
            return
        layout = _layout(manifest)
        watch = nullcontext() if layout == self._layout else Watch()
        with watch as watching:
            self.take_apart()
            self.load(manifest, received.buckets(), watching)
            self.put_together(received.check)
        if watching is not None:
            self._learn(layout, watching, received)

    def _straight(self, manifest: Manifest) -> Destinations | None:
        """The places of such weights, if they are known and can be copied there."""
        return self._destinations if _layout(manifest) == self._layout else None

    def _learn(self, layout: Any, watched: Watch, received: Received) -> None:
        """Keeps the places that a load has shown, if the model holds these weights there."""
        found = None if vllm.packed_copies(self._model) else watched.destinations(self._model)
        if found is None or found.hold(received.weights(found.pieces)):
            self._layout, self._destinations = layout, found

    def take_apart(self) -> None:
        """Opens all layers for new weights."""
        if self.broken:
            self._drop_layers()
        self.broken = True
        # vLLM's CPU build computes with packed copies of the weights; each refers to its source.
        self._packed = vllm.packed_copies(self._model)
        self._put_kernels_aside()
        vllm.open_layers(self._model)

    def load(self, manifest: Manifest, buckets: Iterable[tuple[range, Tensor]], watch: Watch | None = None) -> None:
        """Loads buckets of a manifest, from memory of the host or the model's GPU. Layers with padding keep referring
        to them until `put_together`. `watch` is told the weights' names."""
        weights = self._tensors(manifest, buckets)
        self._model.load_weights(weights if watch is None else watch.named(weights))
        self._wait()

    def _wait(self) -> None:
        """Returns when the GPU has done all copies so far."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _tensors(self, manifest: Manifest, buckets: Iterable[tuple[range, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for bucket, data in buckets:
            # One copy to the device per bucket, while the bucket before is being loaded.
            yield from manifest.cut(bucket, data.to(self._device, non_blocking=True))

    def put_together(self, check: Callable[[], None]) -> None:
        """Closes all layers; the model is complete. `check` raises if the weights changed while they were loaded; the
        model then needs a further push."""
        empty = [name for name, layer in self._model.named_modules() if vllm.got_nothing(layer)]
        vllm.close_layers(self._model, self._config)
        self._put_kernels_back()
        self._repack()
        self.stale = _sharing_nothing(self._model, empty)
        self._wait()
        check()  # last, because layers with padding are copied only when they are closed
        self.broken = False

    def discard(self) -> bool:
        """Ends a push without its weights; True if the model still has its old weights. If not, the next push can
        still be loaded."""
        if self.broken:
            self._drop_layers()
        return not self.broken

    def _drop_layers(self) -> None:
        """Gives layers whose loading was interrupted their own memory back."""
        vllm.drop_layers(self._model)
        self._put_kernels_back()

    def _put_kernels_aside(self) -> None:
        """Lets vLLM's CPU build pack the new experts: it does so only where a mixture has no kernel yet, as on the
        first load, and would copy them unpacked over the packed ones. GPU kernels read the experts as they are."""
        if self._device.type != "cpu":
            return
        self._kernels = vllm.expert_kernels(self._model)
        vllm.set_kernels(dict.fromkeys(self._kernels))

    def _put_kernels_back(self) -> None:
        """Restores the kernels, which refer to the memory that the layers have kept; those that packing made refer to
        temporary tensors."""
        vllm.set_kernels(self._kernels)
        self._kernels = {}

    def _repack(self) -> None:
        """Renews the packed copies of layers that got no weights under their own name, such as a head that shares the
        embeddings' weights."""
        vllm.pack_again(self._packed)
        self._packed = {}


def _layout(manifest: Manifest) -> Any:
    """The part of a manifest that says where its weights go."""
    return manifest.names, manifest.dtypes, manifest.shapes


def _sharing_nothing(model: torch.nn.Module, empty: list[str]) -> list[str]:
    """The layers in `empty` that share no weights with another layer, as a tied head does with the embeddings."""
    names = set(empty)
    # vLLM's CPU build frees the weights of which it has packed copies: their address, 0, is not shared memory.
    filled = {
        weight.untyped_storage().data_ptr()
        for name, layer in model.named_modules()
        if name not in names
        for weight in layer.parameters(recurse=False)
    } - {0}
    layers = dict(model.named_modules())
    return [
        name
        for name in empty
        if any(w.untyped_storage().data_ptr() not in filled for w in layers[name].parameters(recurse=False))
    ]
