"""Division of a minibatch's sequences among ranks, and of a rank's sequences among micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.models.sequences import Batches, length_batches
from services.common.wire.codec import Ints


@dataclass(frozen=True, slots=True)
class Part:
    """One forward pass of one rank."""

    rows: tuple[int, ...]
    """Indices of sequences."""
    counts: bool = True
    """False if the result is not used: the rank computes the part only because the other ranks need it in their
    collectives."""


def shards(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    batches: Batches = length_batches,
    *,
    max_tokens: int,
    world_size: int,
) -> list[list[Part]]:
    """The parts of each rank, equally many for all; each sequence counts in one part of one rank.

    Sequences are dealt out in the order of their length, so that all ranks get about as many tokens, and their n-th
    parts hold sequences of similar length. A rank that has fewer parts repeats the shortest sequence without counting
    it. Without sequences the lists are empty. `batches` divides a rank's sequences into parts.
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
