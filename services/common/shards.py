"""Which sequences each rank works on, in which micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.arrays import Ints
from services.common.sequences import Batches, length_batches


@dataclass(frozen=True, slots=True)
class Part:
    """One forward pass of one rank."""

    rows: tuple[int, ...]
    """Indices of sequences."""
    counts: bool = True
    """False: nothing of it is used. The rank computes it because the others still need it in their collectives."""


def shards(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    batches: Batches = length_batches,
    *,
    max_tokens: int,
    world_size: int,
) -> list[list[Part]]:
    """For each rank its parts, equally many for all; each sequence counts in one part of one rank.

    Sequences are dealt in the order of their length, so that all ranks have about as many tokens to do, and their
    n-th parts sequences of like length. A rank that has fewer parts repeats the shortest sequence without counting
    it. No sequences, no parts. `batches` makes parts of a rank's sequences.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(responses[i]), len(prompts[i])))
    dealt: list[list[Part]] = []
    for rank in range(world_size):
        own = order[rank::world_size]
        made = batches([prompts[i] for i in own], [responses[i] for i in own], max_tokens)
        dealt.append([Part(tuple(own[i] for i in batch)) for batch in made])
    most = max(len(parts) for parts in dealt)
    idle = Part(tuple(order[:1]), counts=False)
    return [parts + [idle] * (most - len(parts)) for parts in dealt]
