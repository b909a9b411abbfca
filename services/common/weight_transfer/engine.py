"""vLLM's side of a gloo push: a weight-transfer engine that stages, then swaps.

vLLM's nccl engine writes each bucket into the model as it comes. This one keeps all of them beside the model
until `finish`, so that a transfer which breaks off leaves the serving weights whole, at the price of one more
copy of the weights while the push lasts.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.common.weight_transfer.gloo import GlooGroup, reach_store
from services.common.weight_transfer.manifest import Manifest


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins: the sender's store, and the worker's place in the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    epoch: int
    host: str
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """A Manifest's fields as plain lists."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Registered with vLLM as the backend `gloo` (see plugin.py)."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checksum = ""
        """sha256 of the bytes last received."""
        self._group: GlooGroup | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the epoch's group, leaving the one before."""
        self.shutdown()
        store = reach_store(init_info.master_address, init_info.master_port, init_info.timeout_s)
        self._group = GlooGroup(
            store,
            host=init_info.host,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            epoch=init_info.epoch,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Begins with nothing staged; the model is untouched until finish."""
        self._staged = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives. (The base class would then synchronise an accelerator, which a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Stages every bucket and hashes what came."""
        if self._group is None:
            raise RuntimeError("no transfer group: prepare comes before transfer")
        manifest = Manifest.from_fields(vars(update_info))
        digest = hashlib.sha256()
        try:
            for bucket in manifest.buckets():
                data = torch.empty(sum(manifest.size(index) for index in bucket), dtype=torch.uint8)
                self._group.broadcast(data)
                digest.update(memoryview(data.numpy()))
                self._staged.extend(manifest.cut(bucket, data))
        except BaseException:
            self.discard()
            raise
        self.checksum = digest.hexdigest()

    def finish_weight_update(self) -> None:
        """Swaps the staged weights in."""
        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in self._staged)
        finalize_layerwise_reload(self.model, self.model_config)
        self._staged = []
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """With tied embeddings on a CPU, oneDNN's packed copy of lm_head does not follow the new embeddings."""
        head: Any = getattr(self.model, "lm_head", None)
        embedding: Any = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        if self.device.type == "cpu" and tied and None not in (head, embedding) and head is not embedding:
            head.quant_method.tie_weights(head, embedding)
            head.quant_method.process_weights_after_loading(head)

    def discard(self) -> None:
        """Forgets what is staged and leaves the group: the model keeps the weights it has."""
        self._staged = []
        self.shutdown()

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


class WorkerExtension:
    """Methods that vLLM adds to its workers, for what its own weight-transfer calls leave out."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def weights_checksum(self) -> str:
        """sha256 of the bytes this worker received last; empty where the backend keeps none."""
        return str(getattr(self.weight_transfer_engine, "checksum", ""))

    def abort_weight_update(self) -> None:
        """Ends a push without its weights."""
        self._weight_update_active = False
        discard = getattr(self.weight_transfer_engine, "discard", self.weight_transfer_engine.shutdown)
        discard()
