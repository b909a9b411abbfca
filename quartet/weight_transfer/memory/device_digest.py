"""A digest of GPU memory that is computed where the memory is, so that only 16 bytes go to the host."""

import struct

import torch

CHUNK_WORDS = 1 << 22
"""Words of eight bytes that `torch_sums` mixes at a time: 32 MiB, and a few times that for intermediate results."""
# Odd constants of MurmurHash3's and SplitMix64's finalizers, as signed numbers.
MIX = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
MIX_AGAIN = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
STEP = 0x9E3779B97F4A7C15 - 2**64


def device_digest(data: torch.Tensor) -> bytes:
    """16 bytes that differ if any byte of a uint8 tensor differs, or two have changed places; the same on every
    device.

    Each word is mixed with its place by one-to-one steps, and the results are summed modulo 2**64, in two different
    ways: one changed word changes both sums for certain, several cancel out by chance once in 2**128. A sum does not
    depend on the order of its parts, so the memory may be cut and dealt out to processors in any way.

    A GPU does it in one kernel that reads each byte once (`digest_kernel`); `torch_sums` is the reference.
    """
    if data.device.type == "cuda" and len(data):
        # Imported here, because it takes a second, and torch brings Triton along only where it may find a GPU.
        from quartet.weight_transfer.memory.digest_kernel import kernel_sums

        sums = kernel_sums(data)
    else:
        sums = torch_sums(data)
    # Waits for all earlier work of this stream as well, such as the copies that filled the memory.
    return struct.pack("<qq", *sums.tolist())


def torch_sums(data: torch.Tensor) -> torch.Tensor:
    """The two sums of uint8 [bytes] by torch's operations, which read and write the memory many times; int64, [2].
    Zeros fill the last word up."""
    whole = len(data) // 8 * 8
    sums = [torch.zeros(2, dtype=torch.int64, device=data.device)]
    first = 0
    for part in (data[:whole], _padded(data[whole:])):
        for words in part.view(torch.int64).split(CHUNK_WORDS):
            sums.append(_mixed(words, first))
            first += len(words)
    return torch.stack(sums).sum(0)


def _padded(rest: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(8 if len(rest) else 0, dtype=torch.uint8, device=rest.device)
    padded[: len(rest)] = rest
    return padded


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """Two sums over int64 words, the first of which is at the place `first`: int64, [2]."""
    places = torch.arange(first + 1, first + 1 + len(words), device=words.device).mul_(STEP)
    mixed = _finalized(places.add_(words), MIX)
    total = mixed.sum()
    return torch.stack((total, _finalized(mixed, MIX_AGAIN).sum()))


def _finalized(words: torch.Tensor, factors: tuple[int, int]) -> torch.Tensor:
    """Mixes each word in place, so that each of its bits depends on all others."""
    for factor in factors:
        words ^= (words >> 32) & 0xFFFFFFFF  # torch shifts in the sign
        words *= factor
    words ^= (words >> 32) & 0xFFFFFFFF
    return words
