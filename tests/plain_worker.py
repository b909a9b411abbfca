"""A worker of vLLM's CPU build that computes with plain weights, as on a GPU: nothing is packed here, so that weights
can be copied straight into place."""

from typing import Any

import torch
from vllm.model_executor.layers import utils

from quartet.weight_transfer.pieces import StagedPieces
from services.rollout.vllm import arguments
from services.rollout.vllm.transfer import WorkerExtension


def _plain_product(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's packing."""
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _plain_product  # type: ignore[assignment]


class PlainWorker(WorkerExtension):
    """A worker whose process has imported this module before it loads the model."""

    def kept_bytes(self) -> int:
        """Bytes that this worker keeps of the last push, if it keeps its own pieces alone; 0 if not."""
        staged = self.weight_transfer_engine._receiver._staged
        return sum(part.nbytes for part in staged._parts) if isinstance(staged, StagedPieces) else 0


def plain_args(*given: Any) -> Any:
    """The arguments of an engine with such workers, in place of those of a replica's."""
    made = arguments.engine_args(*given)
    made.worker_extension_cls = f"{PlainWorker.__module__}.{PlainWorker.__name__}"
    return made
