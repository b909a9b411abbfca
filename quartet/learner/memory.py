"""Sums of the GPU memory of a learner, so that what cannot fit is refused.

They follow what torch and DeepSpeed allocate (tests/unit/quartet/learner/test_memory.py compares them).
"""

from quartet.config.learner import GROUP_ELEMENTS, REDUCE_ELEMENTS, LearnerConfig
from quartet.models.numerics import CHUNK_ELEMENTS
from quartet.models.runs import runs
from quartet.models.size import BYTES, ModelSize
from quartet.models.tiles import TILE_ELEMENTS

LIVE_PARAMETERS = 1_000_000_000
"""Parameters that DeepSpeed's ZeRO 3 keeps gathered at most, by default (`stage3_max_live_parameters`)."""
AVERAGED_ELEMENTS = 500_000_000
"""Elements of gradients that it copies together to add them up without ZeRO (`buffered_allreduce_fallback`)."""
FETCHED_PARAMETERS = 50_000_000
"""Parameters that it gathers at once in advance, by default (`stage3_prefetch_bucket_size`), then copies apart."""


def learner_bytes(config: LearnerConfig, shape: ModelSize, *, logits: bool) -> int:
    """Most bytes that the tensors of one rank hold at a time: in a backward pass, when every parameter has a gradient
    already, or in the optimizer's step after it.

    Args:
        config: the learner.
        shape: its model.
        logits: True for a language model, False for a value model, which has no large head.
    """
    shape = shape if logits else shape.body
    passing = _gathered(config, shape) + _pass(config, shape, logits=logits)
    return kept_bytes(config, shape) + max(passing, _copied(config, shape), _step(config, shape))


def trained_parameters(config: LearnerConfig, shape: ModelSize) -> int:
    """Parameters of one copy's part of the model that have gradients."""
    return shape.adapters(config.lora.rank) if config.lora else shape.parameters // config.tensor_parallel.size


def step_groups(config: LearnerConfig, shape: ModelSize) -> list[int]:
    """Parameters of each group of ZeRO 1 or 2 on one rank (learner/module.py)."""
    size, copies = config.tensor_parallel.size, config.copies
    adapters = [shape.adapters(config.lora.rank) // shape.layers] * shape.layers if config.lora else []
    weights = adapters or [count // size for count in shape.weights]
    return [sum(group) // copies for group in runs(weights, int, GROUP_ELEMENTS * copies)]


def state_bytes(config: LearnerConfig, shape: ModelSize) -> int:
    """Bytes of the optimizer's state of all ranks that share one: AdamW's two moments, and with ZeRO another copy of
    the weights in float32."""
    return trained_parameters(config, shape) * (12 if config.zero_stage else 8)


def kept_bytes(config: LearnerConfig, shape: ModelSize) -> int:
    """Bytes of weights, gradients, optimizer state and buckets on one rank's GPU, between two passes."""
    width, copies = BYTES[config.dtype], config.copies
    number, trained = shape.parameters // config.tensor_parallel.size, trained_parameters(config, shape)
    weights = 0 if config.param_offload else number * width // (copies if config.zero_stage == 3 else 1)
    # With adam_offload each gradient moves to the host as soon as the ranks have added it up.
    leaves = config.adam_offload and config.zero_stage >= 2
    gradients = 0 if leaves else trained * width // (copies if config.zero_stage >= 2 else 1)
    optimizer = 0 if config.adam_offload else state_bytes(config, shape) // (copies if config.zero_stage >= 1 else 1)
    bucket = REDUCE_ELEMENTS * width if copies > 1 or config.zero_stage == 3 else 0
    # A gradient on its way to the host and back.
    moving = shape.largest * width if config.adam_offload and config.zero_stage < 3 else 0
    return weights + gradients + optimizer + bucket + moving


def _gathered(config: LearnerConfig, shape: ModelSize) -> int:
    """Bytes of the weights that ZeRO 3 gathers for a pass: layers in advance, the embeddings and the head; and those
    of the last ones once more, which arrive in one piece."""
    if config.zero_stage < 3:
        return 0
    number = shape.parameters // config.tensor_parallel.size
    live = min(number, LIVE_PARAMETERS + 2 * shape.vocabulary * shape.hidden)
    arriving = min(number, FETCHED_PARAMETERS + shape.hidden * shape.intermediate)
    return (live + arriving) * BYTES[config.dtype]


def _pass(config: LearnerConfig, shape: ModelSize, *, logits: bool) -> int:
    """Activations of a forward and backward pass."""
    width, tokens = BYTES[config.dtype], config.micro_batch_tokens
    layer = shape.layer(tokens, width, compiled=config.compile_layers)
    # The gradients of one layer's states, a few at a time.
    backward = tokens * width * (3 * shape.intermediate + 4 * shape.hidden)
    divided = config.tensor_parallel.size > 1
    head = (_logits(shape, tokens, width) if divided else _tiled(shape, tokens, width)) if logits else 0
    if config.recomputes:
        return shape.layers * tokens * shape.hidden * width + max(layer + backward, head)
    return shape.layers * layer + max(backward, head)


def _logits(shape: ModelSize, tokens: int, width: int) -> int:
    """Bytes of a head that is divided among ranks and gives whole logits: these, their gradient, and the pieces in
    float32 of which log-probs are taken.

    A piece is there three times in the backward pass: log-probs, their gradient, and that of the logits
    (models/numerics.py). All logits may be one piece, and are then not kept.
    """
    count = tokens * shape.vocabulary
    piece = CHUNK_ELEMENTS["cuda"]
    return 3 * 4 * count if count <= piece else 2 * count * width + piece * 10


def _tiled(shape: ModelSize, tokens: int, width: int) -> int:
    """Bytes of a head that gives log-probs: a tile, the gradient of the weights, and that of the states in float32
    (models/tiles.py)."""
    return tile_bytes(shape, tokens, width) + shape.vocabulary * shape.hidden * width + 4 * tokens * shape.hidden


def tile_bytes(shape: ModelSize, tokens: int, width: int) -> int:
    """Bytes of a tile of the logits, as they are computed and in float32."""
    return (4 + width) * min(tokens * shape.vocabulary, TILE_ELEMENTS["cuda"])


def _copied(config: LearnerConfig, shape: ModelSize) -> int:
    """Copies of gradients at the end of a backward pass: each rank's share as it leaves the buckets, and with ZeRO 2
    what earlier passes added up."""
    if config.adam_offload or not (config.zero_stage == 2 or (config.zero_stage == 1 and config.copies > 1)):
        return 0
    return trained_parameters(config, shape) // config.copies * BYTES[config.dtype]


def _step(config: LearnerConfig, shape: ModelSize) -> int:
    """Copies of the gradient that DeepSpeed makes for the optimizer's step: a flat one, and in half precision one in
    float32; with ZeRO of one group at a time. Without ZeRO several ranks add it up in copies of
    AVERAGED_ELEMENTS at most."""
    copies, trained = config.copies, trained_parameters(config, shape)
    if config.zero_stage == 0 and copies > 1:
        return min(trained, AVERAGED_ELEMENTS) * BYTES[config.dtype]
    if config.zero_stage == 0 or config.adam_offload:
        return 0
    if config.zero_stage == 3:
        group = min(trained // copies, GROUP_ELEMENTS + shape.largest // copies)
    else:
        group = max(step_groups(config, shape))
    return group * (4 if config.dtype == "float32" else 6)
