"""Attention over sequences that lie one after another in a row. None attends to another, but several may continue one
that is there once."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quartet.models.numerics import widen
from quartet.seams.transformers import takes_attention

BY_LENGTH = ("longrope", "dynamic")
"""Kinds of rotary embeddings whose frequencies depend on the longest position of a pass."""
NAME = "packed_sdpa"
"""The name under which it is registered with transformers, which makes no attention mask for an unknown name."""
Kernel = Callable[..., torch.Tensor]
"""torch.nn.attention.varlen.varlen_attn, or a function with its arguments."""


class Pieces:
    """The N pieces of a row: whole sequences, beginnings that several sequences share, and the rests of these.

    Tuples would have torch's compiler compile the layers, through which they pass, for every number of pieces; of
    such an object it looks at the class only.
    """

    def __init__(self, lengths: Sequence[int], behind: Sequence[int | None] = ()) -> None:
        """
        Args:
            lengths: tokens of each piece, more than 0.
            behind: for each piece the one that it continues; None if it continues none; nothing at all if none does.
        """
        self.lengths = tuple(lengths)
        self.behind = tuple(behind) or (None,) * len(self.lengths)
        self.shared = any(first is not None for first in self.behind)
        """True if some piece continues another one."""
        self.reaches = tuple(
            length + (0 if first is None else self.lengths[first])
            for length, first in zip(self.lengths, self.behind, strict=True)
        )
        """Tokens that the last token of each piece attends to: its own piece, and the one that this continues."""

    def reached(self, states: torch.Tensor) -> torch.Tensor:
        """The states of the tokens to which each piece attends, end to end; a beginning is there once for itself and
        once for each piece that continues it. [1, heads, L, D] -> [1, heads, sum of reaches, D]."""
        if not self.shared:
            return states
        parts = states.split(self.lengths, dim=2)
        chosen = ((*(() if first is None else (first,)), own) for own, first in enumerate(self.behind))
        return torch.cat([parts[index] for each in chosen for index in each], dim=2)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_pieces: Pieces | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each piece and to the whole of the one that it continues. query [1, heads, L, D], key
    and value [1, groups, L, D] -> [1, L, heads, D].

    The cost is the sum of the squares of the lengths: a mask over the whole row, block by block, would cost the
    square of their sum. In half precision on a GPU one kernel takes all pieces. Elsewhere torch's fused kernel takes
    those of one length together. RuntimeError if the model passes on no pieces, or there are several rows.

    Args:
        packed_pieces: N pieces, known to the host, so that no layer has to ask the device for them.
        cu_seq_lens_q: [N + 1] int32, the columns at which pieces begin, then the end of the last one.
        cu_seq_lens_k: [N + 1] int32, the same of the tokens that they reach, end to end.
    """
    if packed_pieces is None or cu_seq_lens_q is None or cu_seq_lens_k is None or query.shape[0] != 1:
        raise RuntimeError("packing: this architecture's attention gets no lengths of the sequences in a single row")
    key, value = packed_pieces.reached(key), packed_pieces.reached(value)
    kernel = _varlen() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None
    if kernel is not None:
        bounds = (cu_seq_lens_q, cu_seq_lens_k)
        longest = (max(packed_pieces.lengths), max(packed_pieces.reaches))
        return by_kernel(kernel, query, key, value, bounds, longest, options.get("scaling")), None
    # Pieces of one length are neighbours, as passes have them in the order of their lengths.
    sizes = zip(packed_pieces.lengths, packed_pieces.reaches, strict=True)
    runs = [(*size, len(list(run))) for size, run in itertools.groupby(sizes)]
    queries = _by_length(query, [(length, count) for length, _, count in runs])
    keys, values = (_by_length(state, [(reach, count) for _, reach, count in runs]) for state in (key, value))
    pieces = []
    for run in zip(queries, keys, values, strict=True):
        mask = _seen(run[0].shape[2], run[1].shape[2], query.device)
        attended = sdpa_attention_forward(module, *map(_precise, run), mask, **options)[0]
        pieces.append(attended.to(query.dtype).flatten(0, 1)[None])
    return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0], None


def _seen(length: int, reach: int, device: torch.device) -> torch.Tensor | None:
    """[1, 1, length, reach] bool, True where a token of a piece attends to one that it reaches; None for a sequence
    from its first token on, for which the fused kernel needs no mask."""
    if length == reach:
        return None
    return torch.ones(1, 1, length, reach, dtype=torch.bool, device=device).tril(reach - length)


def _by_length(state: torch.Tensor, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """[1, heads, L, D] -> [N, heads, length, D] for each (length, N) of `runs`: N pieces of that length."""
    parts = state.split([length * count for length, count in runs], dim=2) if len(runs) > 1 else [state]
    return [part[0].unflatten(1, (-1, length)).transpose(0, 1) for part, (length, _) in zip(parts, runs, strict=True)]


def _precise(state: torch.Tensor) -> torch.Tensor:
    """The input of the fused kernel. On a CPU that is float32: its backward pass takes three times as long in half
    precision, its forward pass about the same."""
    return widen(state) if state.device.type == "cpu" else state


def by_kernel(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """Packed attention by one kernel, which lets the last query of a piece see all keys of the piece, the one before
    it all but the last, and so on.

    Args:
        kernel: the kernel.
        query: [1, heads, L, D].
        key: [1, groups, K, D], those that each piece reaches.
        value: as `key`.
        boundaries: [N + 1] int32 each, of the pieces' queries and of their keys.
        longest: queries and keys that a piece has at most.
        scale: factor of the scores.

    Returns:
        [1, L, heads, D]
    """
    rows = [state[0].transpose(0, 1).contiguous() for state in (query, key, value)]
    options = {"enable_gqa": True} if key.shape[1] < query.shape[1] and _asks_for_groups(kernel) else {}
    attended = kernel(*rows, *boundaries, *longest, scale=scale, window_size=(-1, 0), **options)
    return attended[None]


@functools.cache
def _asks_for_groups(kernel: Kernel) -> bool:
    """True if fewer key heads than query heads have to be asked for, as from torch 2.13 on. Earlier ones take them
    as they come: the kernel below is the same."""
    return "enable_gqa" in inspect.signature(kernel).parameters


@functools.cache
def _varlen() -> Kernel | None:
    """Torch's kernel, or None if this version of torch lacks it or has it in another form."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size"}
    return varlen_attn if wanted <= inspect.signature(varlen_attn).parameters.keys() else None


def caps(config: Any) -> bool:
    """True if attention scores are capped (Gemma 2). Torch's fused kernel cannot do that, and transformers then omits
    the cap silently."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def _inexact(model: Any, attention: str) -> str:
    """The property of a transformers model that makes packing inexact; empty if every layer attends to its whole
    sequence through an attention function: no sliding window, no recurrent state that would run on into the next
    sequence, no rotation that depends on the length of others, and no scores that this attention cannot cap."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    window = getattr(model.config, "sliding_window", None)
    if set(kinds) != {"full_attention"} or window is not None or not takes_attention(model):
        return "has layers without plain causal attention"
    if rope := _scaled_by_length(model.config):
        return f"has rotary frequencies ({rope}) that depend on the longest position of a pass"
    if attention == "sdpa" and caps(model.config):
        return "caps its attention scores"
    return ""


def problem(model: Any, path: str, attention: str = "sdpa") -> str:
    """The reason for which the model in the folder `path` must not be packed, and what to do; empty if it may be."""
    reason = _inexact(model, attention)
    return f"{path} ({model.config.model_type}) {reason}; set packing to false" if reason else ""


def _scaled_by_length(config: Any) -> str:
    """The kind of rotary embedding if it depends on the longest position of the pass, which may be another pair's;
    empty otherwise."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return next((kind for kind in BY_LENGTH if f"'{kind}'" in str(rope)), "")


AttentionInterface.register(NAME, packed_attention)
