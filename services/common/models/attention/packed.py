"""Attention over sequences that lie one after another in a row; none attends to another."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.common.models.attention.prefixes import Past
from services.common.models.numerics import widen

NAME = "packed_sdpa"
"""The name under which it is registered with transformers, which makes no attention mask for an unknown name."""

MASKED_ROWS = 512
"""Most queries of a continued sequence at a time, as these need a mask."""
Kernel = Callable[..., torch.Tensor]
"""torch.nn.attention.varlen.varlen_attn, or a function with its arguments."""


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_lengths: tuple[int, ...] | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    packed_past: Past | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence. query [1, heads, L, D], key and value [1, groups, L, D]
    -> [1, L, heads, D].

    The cost is the sum of the squares of the lengths: a mask over the whole row, block by block, would cost the
    square of their sum. In half precision on a GPU one kernel takes all sequences, elsewhere torch's fused kernel
    takes one after the other. RuntimeError if the model passes on no lengths, or there are several rows.

    Args:
        packed_lengths: N lengths, known to the host, so that no layer has to ask the device for them.
        cu_seq_lens_q: [N + 1] int32, the columns at which sequences begin, then the end of the last one.
        packed_past: keys and values of the tokens before those in the row, in this and every other layer.
    """
    if packed_lengths is None or cu_seq_lens_q is None or query.shape[0] != 1:
        raise RuntimeError("packing: this architecture's attention gets no lengths of the sequences in a single row")
    kernel = _varlen() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None
    if kernel is not None and packed_past is None:
        return by_kernel(kernel, query, key, value, cu_seq_lens_q, max(packed_lengths), options.get("scaling")), None
    dtype = query.dtype
    # On a CPU the fused kernel's backward pass takes three times as long in bfloat16 as in float32; its forward pass
    # takes about the same.
    whole = [widen(states) if states.device.type == "cpu" else states for states in (query, key, value)]
    split = (states.split(packed_lengths, dim=2) for states in whole)
    pieces = []
    for sequence, (queries, keys, values) in enumerate(zip(*split, strict=True)):
        if packed_past is not None:
            keys, values = packed_past.extended(sequence, module.layer_idx, keys, values)
        for some, seen, mask in _blocks(queries, keys):
            past = keys[:, :, :seen], values[:, :, :seen]
            pieces.append(sdpa_attention_forward(module, some, *past, mask, **options)[0])
    return torch.cat(pieces, dim=1).to(dtype), None


def _blocks(queries: torch.Tensor, keys: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, torch.Tensor | None]]:
    """Divides the queries of the last L of N tokens, [1, heads, L, D], into blocks, whose masks take little memory.

    Yields the queries of a block, the number of first tokens that they see, and a mask [rows, seen], True where a
    query sees a token. If L is N, all queries with no mask, since the kernel knows that one.
    """
    rows, columns = queries.shape[2], keys.shape[2]
    if rows == columns:
        yield queries, columns, None
        return
    seen = columns - rows
    for block in queries.split(MASKED_ROWS, dim=2):
        before, seen = seen, seen + block.shape[2]
        mask = torch.ones(block.shape[2], seen, dtype=torch.bool, device=block.device)
        yield block, seen, mask.tril(before)


def by_kernel(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """Packed attention by one kernel that takes the boundaries [N + 1]. Shapes as for packed_attention."""
    groups = query.shape[1] // key.shape[1]
    # Some versions of the kernel need as many key heads as query heads.
    states = (query, *(states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value)))
    rows = [state[0].transpose(0, 1).contiguous() for state in states]
    attended = kernel(*rows, boundaries, boundaries, longest, longest, scale=scale, window_size=(-1, 0))
    return attended[None]


_ATTEND_TWICE = {"diffllama"}
"""Architectures whose layers call the attention function twice, with different values."""


@functools.cache
def _varlen() -> Kernel | None:
    """Torch's kernel, or None if this version of torch lacks it or has it in another form."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size"}
    return varlen_attn if wanted <= inspect.signature(varlen_attn).parameters.keys() else None


def continues(model: Any) -> bool:
    """True if a layer's keys and values can be kept for the tokens that follow: it attends once. Needs `takes`."""
    return takes(model) and model.config.model_type not in _ATTEND_TWICE


def caps(config: Any) -> bool:
    """True if attention scores are capped (Gemma 2). Torch's fused kernel cannot do that, and transformers then omits
    the cap silently."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def takes(model: Any) -> bool:
    """True if every layer of a transformers model attends to its whole sequence through an attention function, so
    that packing is exact: no sliding window, no recurrent state that would run on into the next sequence, and no
    rotation that depends on the length of others."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    window = getattr(model.config, "sliding_window", None)
    plain = set(kinds) == {"full_attention"} and window is None and not _scales_by_length(model.config)
    return bool(model._supports_attention_backend) and plain


def _scales_by_length(config: Any) -> bool:
    """True if the rotation of a position depends on the longest position of the pass, which may be another pair's."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return any(kind in str(rope) for kind in ("'longrope'", "'dynamic'"))


AttentionInterface.register(NAME, packed_attention)
