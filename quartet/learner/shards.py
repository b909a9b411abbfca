"""Division of a minibatch's sequences among ranks, and of a rank's sequences among micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from quartet.models.sequences import Batches, length_batches
from quartet.models.sharing import sharing
from quartet.wire.codec import Ints


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of one rank."""

    rows: tuple[int, ...]
    """Indices of sequences."""
    counts: bool = True
    """False if the result is not used: the rank computes the pass only because the other ranks need it in their
    collectives."""


def shards(
    prompts: Sequence[Ints],
    responses: Sequence[Ints],
    batches: Batches = length_batches,
    *,
    max_tokens: int,
    world_size: int,
    group: int = 1,
    shared: bool = False,
) -> list[list[Pass]]:
    """The passes of each rank, equally many for all; each sequence counts in one pass of one rank.

    Sequences are dealt out in the order of their length, so that all ranks get about as many tokens, and their n-th
    passes hold sequences of similar length. A rank that has fewer passes repeats the shortest sequence without
    counting it. Without sequences the lists are empty. `batches` divides a rank's sequences into passes.

    Each `group` of sequences, which follow each other, stays together; as many as its longest ones would be. With
    `shared` those that share a prompt (`sharing`) are dealt out as one, as long as there is one for each rank; the
    others are divided, and each part has a copy of the prompt.
    """
    if group > 1:
        firsts = range(0, len(prompts), group)
        asked, answered = ([max(rows[i : i + group], key=len) for i in firsts] for rows in (prompts, responses))
        of_groups = shards(asked, answered, batches, max_tokens=max_tokens // group, world_size=world_size)
        return [[_with_members(one, group) for one in passes] for passes in of_groups]
    groups = sharing(prompts, responses) if shared else [[i] for i in range(len(prompts))]
    groups.sort(key=lambda rows: (sum(len(responses[i]) for i in rows), len(prompts[rows[0]])))
    whole = len(groups) - len(groups) % world_size
    rest = list(chain.from_iterable(groups[whole:]))
    each = -(-len(rest) // world_size)
    dealt: list[list[Pass]] = []
    for rank in range(world_size):
        own = [*chain.from_iterable(groups[rank:whole:world_size]), *rest[rank * each : (rank + 1) * each]]
        made = batches([prompts[i] for i in own], [responses[i] for i in own], max_tokens)
        dealt.append([Pass(tuple(own[i] for i in batch)) for batch in made])
    most = max(len(passes) for passes in dealt)
    shortest = sorted(range(len(prompts)), key=lambda i: (len(responses[i]), len(prompts[i])))[:1]
    idle = Pass(tuple(shortest), counts=False)
    return [passes + [idle] * (most - len(passes)) for passes in dealt]


def _with_members(one: Pass, group: int) -> Pass:
    """The pass of whole groups as one of their sequences."""
    return Pass(tuple(group * index + member for index in one.rows for member in range(group)), one.counts)
