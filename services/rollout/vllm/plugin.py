"""vLLM's entry point (`vllm.general_plugins`): loaded in every process of an engine."""

import os

from quartet.ranks.nccl_settings import reserve
from services.rollout.vllm.matrix_tiles import allow_matrix_tiles
from services.rollout.vllm.parent import end_with_parent


def register() -> None:
    """Registers the weight-transfer engine `quartet`, lets the process end with the one that started it, lets it
    compute in bfloat16 where the processor has AMX, and adds the variables that a push by NCCL changes, before there
    is a group.

    vLLM loads plugins several times in a process; further calls do nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if "quartet" not in Factory._registry:
        Factory.register_engine("quartet", "services.rollout.vllm.transfer", "QuartetWeightTransferEngine")
    reserve(os.environ)
    end_with_parent()
    allow_matrix_tiles()
