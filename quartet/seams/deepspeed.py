"""Names of DeepSpeed's engine that are not part of its interface: its kernels, what it does at the first steps, with
gradients before a step, its checkpoint engine, and the plans and marks by which AutoTP divides weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

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


def without_average(engine: Any) -> None:
    """Keeps an engine with ZeRO 1 or 2, of which there is one copy, from averaging each gradient over that copy: a
    division and a collective for each parameter; and from copying all gradients into one tensor before, which would
    hold those of a group until the last one's step."""
    optimizer = engine.optimizer

    def keep(parameter: nn.Parameter, *_: Any) -> None:
        if parameter.grad is not None and parameter.numel() <= optimizer.reduce_bucket_size:
            # It is in the bucket, which the next gradients overwrite.
            parameter.grad.data = parameter.grad.data.clone()

    optimizer.average_tensor = lambda *_: None
    optimizer.copy_grads_in_partition = keep


def with_norm_in_one_pass(engine: Any) -> None:
    """Has an engine with ZeRO 1 or 2, without tensor parallelism and with its optimizer on the device, read the
    gradients once before a step, for their norm, and clip them without a wait. By itself it looks for infinities
    first, which the norm shows as well, and then copies each gradient into float64: 22 bytes a parameter instead of
    2, and eight times as many kernels; and it waits for the norm again in each group. The norm is in float32; one
    that is not finite skips the step as before."""
    optimizer = engine.optimizer

    def norm() -> Tensor:
        gradients = [each for group in optimizer.averaged_gradients.values() for each in group]
        real = [each for each in gradients if not getattr(each, "_zero_padding", False)]
        own = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in real]
        total = torch.stack(own).square().sum() if own else torch.zeros((), device=engine.device)
        distributed.all_reduce(total, group=optimizer.dp_process_group)
        return total.sqrt()

    def clip(gradients: Sequence[Tensor], total: Tensor) -> None:
        for gradient in gradients:
            gradient.mul_(1 / ((total + 1e-6) / optimizer.clip_grad).clamp(min=1))

    optimizer.check_overflow = lambda *_, **__: None
    optimizer.scaled_global_norm = norm
    optimizer.unscale_and_clip_grads = clip


def without_comparison_of_batches(engine: Any) -> None:
    """Keeps an engine with tensor parallelism from comparing the ranks' first batches, which it would pickle."""
    engine.first_dataloader_check.remove()


def save_by(engine: Any, saver: Any) -> None:
    """Makes `save_checkpoint` and `load_checkpoint` of an engine write and read by `saver`, an object like those of
    deepspeed.runtime.checkpoint_engine."""
    engine.checkpoint_engine = saver


def clip_as_configured(engine: Any) -> None:
    """Has an engine clip gradients to its own configured norm after `load_checkpoint`, which with ZeRO 1 and 2 sets
    the norm of the checkpoint's run."""
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = engine.gradient_clipping()


def divisible_styles() -> frozenset[str]:
    """The styles in a transformers model's plan for tensor parallelism (`base_model_tp_plan`) that AutoTP can carry
    out."""
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    return frozenset(SUPPORTED_STYLES)


def division_of(parameter: nn.Parameter) -> Mapping[str, Any] | None:
    """AutoTP's note on a parameter that it has divided: its `logical_shape`, along whose `partition_dim` the pieces
    have `partition_sizes`; and `sub_param_sizes`. None if every rank has it whole."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    noted: Mapping[str, Any] | None = getattr(parameter, DS_AUTOTP_UC_META, None)
    return None if noted is None or noted["replicated"] else noted
