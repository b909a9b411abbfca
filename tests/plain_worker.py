"""A worker of vLLM's CPU build that computes with plain weights, as on a GPU: nothing is packed here, so that weights
can be copied straight into place."""

from pathlib import Path
from typing import Any

from vllm.model_executor.layers import utils

from quartet.weight_transfer.pieces import StagedPieces
from services.rollout.vllm.transfer import WorkerExtension
from tests import plain

utils.dispatch_cpu_unquantized_gemm = plain.product  # type: ignore[assignment]


class PlainWorker(WorkerExtension):
    """A worker whose process imports this module before it loads the model, and no other process: engines that start
    later in it would pack nothing either."""

    def kept_bytes(self) -> int:
        """Bytes that this worker keeps of the last push, if it keeps its own pieces alone; 0 if not."""
        receiver: Any = self.weight_transfer_engine._receiver
        staged = receiver._staged
        return sum(part.nbytes for part in staged._parts) if isinstance(staged, StagedPieces) else 0

    def shared_memory(self) -> list[str]:
        """Names of the memory of the workers that this one has open."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.partition("/dev/shm/")[2] for line in lines if "cpushm" in line]
