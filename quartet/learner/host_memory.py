"""Sums of the host memory of a learner, beside those of its GPU (learner/memory.py).

They follow what DeepSpeed allocates (tests/unit/quartet/learner/test_host_memory.py compares them). Pinned
memory comes from torch's allocator, which rounds each tensor up to a power of two.
"""

from quartet.config.learner import LearnerConfig
from quartet.learner.memory import state_bytes, step_groups, trained_parameters
from quartet.models.size import BYTES, ModelSize

OPTIMIZER = "optimizer"
"""Kind of memory: masters, moments and gradients that are offloaded, and those of `colocate` between updates."""
WEIGHTS = "offloaded weights"
MEAN = "running mean"
COPIES = "copies for checkpoints"
READING = "reading the model"
"""Kind of memory: the whole model, which each process reads as it starts; a rank, before DeepSpeed divides it."""
SUB_GROUP = 1_000_000_000
"""Most parameters whose offloaded gradients DeepSpeed's ZeRO 3 keeps in one tensor, by default (`sub_group_size`)."""


def held_bytes(config: LearnerConfig, shape: ModelSize) -> dict[str, int]:
    """Bytes of host memory that a rank on a GPU holds from its first update on, by kind. `shape` is the model that is
    trained: of a value model the body."""
    width = BYTES[config.dtype]
    own = -(-trained_parameters(config, shape) // config.copies)
    held = {}
    if config.adam_offload:
        held[OPTIMIZER] = _offloaded(config.zero_stage, own, width, largest=shape.largest)
    elif config.colocate:
        held[OPTIMIZER] = 3 * sum(pinned(4 * group) for group in step_groups(config, shape))
    if config.param_offload:
        held[WEIGHTS] = pinned(own * width)
    if config.ema_decay:
        held[MEAN] = 4 * (own if config.zero_stage == 3 else trained_parameters(config, shape))
    return held


def _offloaded(stage: int, own: int, width: int, *, largest: int) -> int:
    """Bytes for `own` parameters: masters, their gradient and two moments in float32, and more in the model's dtype.

    Stage 3 accumulates gradients in one pinned tensor. Stages 1 and 2 have pinned tensors for the weights on their
    way back and for the gradient of one parameter, of which the largest has `largest` numbers; stage 2 accumulates
    the gradients too, each in a tensor of its own.
    """
    if stage == 3:
        whole, rest = divmod(own, SUB_GROUP)
        return 3 * 4 * own + whole * pinned(4 * SUB_GROUP) + pinned(4 * rest) + pinned(own * width)
    accumulated = own * width if stage == 2 else 0
    return 2 * 4 * own + 2 * pinned(4 * own) + pinned(own * width) + pinned(largest * width) + accumulated


def copied_bytes(config: LearnerConfig, shape: ModelSize, *, exported: bool, rank: int) -> int:
    """Bytes of host memory for the copies from which a rank writes a checkpoint while training goes on; if
    `exported`, the checkpoint holds a model to load too."""
    width, divided = BYTES[config.dtype], config.copies if config.zero_stage else 1
    whole = shape.parameters // config.tensor_parallel.size
    count = state_bytes(config, shape) // divided if config.zero_stage or not rank else 0
    if config.zero_stage < 3 and rank < config.tensor_parallel.size:
        count += whole * width
    if exported and not rank:
        count += shape.parameters * width
    if config.ema_decay:
        count += held_bytes(config, shape)[MEAN]
    return count


def pinned(size: int) -> int:
    """Bytes that torch takes for a pinned tensor of `size` bytes."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
