"""What Quartet's weight-transfer engines for vLLM have in common: loading into the model, and knowing it is whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

InitInfo = TypeVar("InitInfo", bound=WeightTransferInitInfo)


@dataclass
class PackedUpdateInfo(WeightTransferUpdateInfo):
    """A Manifest's fields as plain lists."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class LoadingEngine(WeightTransferEngine[InitInfo, PackedUpdateInfo], Generic[InitInfo]):
    """An engine that verifies first and loads then."""

    update_info_cls = PackedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checksum = ""
        """Of the bytes last received."""
        self._broken = False
        """The model was taken apart and not put together again."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives. (The base class would then synchronise an accelerator, which a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def _take_apart(self) -> None:
        initialize_layerwise_reload(self.model)
        self._broken = True

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(self._here(weights))

    def _here(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(self.device)) for name, tensor in weights)

    def _put_together(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """With tied embeddings on a CPU, oneDNN's packed copy of lm_head does not follow the new embeddings."""
        head: Any = getattr(self.model, "lm_head", None)
        embedding: Any = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        if self.device.type == "cpu" and tied and None not in (head, embedding) and head is not embedding:
            head.quant_method.tie_weights(head, embedding)
            head.quant_method.process_weights_after_loading(head)

    def discard(self) -> bool:
        """Ends a push without its weights; whether the model is whole, with the weights it had."""
        self.shutdown()
        return not self._broken
