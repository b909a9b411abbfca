"""Names of DeepSpeed's engine that are not part of its interface: its kernels, what it does at the first steps, its
checkpoint engine, and the plans and marks by which AutoTP divides weights."""

from collections.abc import Mapping
from typing import Any

from torch import nn

VERSIONS = ">=0.19.8,<0.20"


def without_shared_memory_kernel() -> None:
    """Keeps DeepSpeed's first start on a CPU from compiling a kernel for collectives in shared memory for half a
    minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def without_reduction(engine: Any) -> None:
    """Keeps the engine of a single rank without ZeRO from copying all gradients into one bucket and back, to average
    them over that rank."""
    engine.enable_backward_allreduce = False


def without_comparison_of_batches(engine: Any) -> None:
    """Keeps an engine with tensor parallelism from comparing the ranks' first batches, which it would pickle."""
    engine.first_dataloader_check.remove()


def save_by(engine: Any, saver: Any) -> None:
    """Makes `save_checkpoint` and `load_checkpoint` of an engine write and read by `saver`, an object like those of
    deepspeed.runtime.checkpoint_engine."""
    engine.checkpoint_engine = saver


def divisible_styles() -> frozenset[str]:
    """The styles in a transformers model's plan for tensor parallelism (`base_model_tp_plan`) that AutoTP can carry
    out."""
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    return frozenset(SUPPORTED_STYLES)


def division_of(parameter: nn.Parameter) -> Mapping[str, Any] | None:
    """AutoTP's note on a parameter that it has divided: `partition_sizes`, `partition_dim`, `sub_param_sizes` and
    `logical_shape`. None if it is whole."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    noted: Mapping[str, Any] | None = getattr(parameter, DS_AUTOTP_UC_META, None)
    return noted
