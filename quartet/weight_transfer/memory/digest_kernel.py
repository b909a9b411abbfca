"""The device's digest as one Triton kernel, which reads each byte once. Tests run it in Triton's interpreter, on a
CPU; on a GPU pushes by cuda-ipc have run it."""

import torch
import triton
import triton.language as tl

from quartet.weight_transfer.memory import device_digest

WORDS = 4096
"""Words of eight bytes in one program's tile."""
WARPS = 8
# Triton reads only such constants from outside a kernel.
STEP = tl.constexpr(device_digest.STEP)
MIX_1, MIX_2 = (tl.constexpr(factor) for factor in device_digest.MIX)
MIX_3, MIX_4 = (tl.constexpr(factor) for factor in device_digest.MIX_AGAIN)


def kernel_sums(data: torch.Tensor) -> torch.Tensor:
    """The same as `device_digest.torch_sums`, of at least one byte that begins at a multiple of 8.

    Raises:
        ValueError: the memory begins elsewhere.
    """
    if data.data_ptr() % 8:
        raise ValueError(f"digest: the memory begins at {data.data_ptr():#x}; must be a multiple of 8")
    words, rest = divmod(len(data), 8)
    programs = -(-(words + bool(rest)) // WORDS)
    parts = torch.empty((programs, 2), dtype=torch.int64, device=data.device)
    whole, odd = data[: words * 8].view(torch.int64), data[words * 8 :]
    with torch.cuda.device_of(data):  # Triton launches on the current GPU
        _sum[(programs,)](whole, odd, parts, words, rest, WORDS, num_warps=WARPS)
    return parts.sum(0)


@triton.jit
def _finalized(words, first, second):  # type: ignore[no-untyped-def]
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * first  # the sign is shifted in
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * second
    return words ^ ((words >> 32) & 0xFFFFFFFF)


@triton.jit
def _sum(whole, odd, parts, words, rest, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two sums of one tile. Its last word may be `odd`, the 1 to 7 bytes that fill no word."""
    program = tl.program_id(0).to(tl.int64)
    at = program * tile + tl.arange(0, tile)
    values = tl.load(whole + at, mask=at < words, other=0)
    which = tl.arange(0, 8)
    tail = tl.load(odd + which, mask=which < rest, other=0).to(tl.int64)
    tail = tl.sum(tail << (8 * which.to(tl.int64)))
    values = tl.where(at == words, tail, values)
    mixed = _finalized(values + (at + 1) * STEP, MIX_1, MIX_2)
    again = _finalized(mixed, MIX_3, MIX_4)
    counts = (at < words) | ((at == words) & (rest > 0))
    tl.store(parts + 2 * program, tl.sum(tl.where(counts, mixed, 0)))
    tl.store(parts + 2 * program + 1, tl.sum(tl.where(counts, again, 0)))
