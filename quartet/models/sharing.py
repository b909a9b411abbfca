"""Prompts that several responses share: whether one is computed once for all, and the tokens that they hold."""

from collections.abc import Sequence

from torch import Tensor

from quartet.wire.codec import Ints

LEAST_GAIN = 8
"""A prompt is computed once where that leaves out at least one in so many of its pairs' tokens. Pieces of a row are
attended to one after the other on a CPU, and keys of the prompt are copied: a short prompt costs less than that."""
COPIES = 8
"""A prompt's keys and values are copied for each response that continues it. So many tokens' copies are counted as
one token, of which a layer also keeps the other states (tests compare them with ModelSize.layer)."""


def shares(prompt: int, count: int, total: int) -> bool:
    """True if a prompt of so many tokens is computed once for `count` responses, of `total` tokens together."""
    return LEAST_GAIN * (count - 1) * prompt >= count * prompt + total and count > 1


def held(prompt: int, count: int, total: int) -> int:
    """Tokens that a packed row holds of a prompt and its `count` responses, of `total` tokens together: the prompt
    once with an eighth for each response, or with each response where it is not shared."""
    if not shares(prompt, count, total):
        return count * prompt + total
    return prompt + total + -(-count * prompt // COPIES)


def sharing(prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[list[int]]:
    """Indices of pairs: those that share a prompt together, each other one alone, in the order of their first."""
    same: dict[bytes, list[int]] = {}
    for pair, prompt in enumerate(prompts):
        same.setdefault(prompt.tobytes(), []).append(pair)
    groups = []
    for group in same.values():
        total = sum(len(responses[pair]) for pair in group)
        together = shares(len(prompts[group[0]]), len(group), total)
        groups.extend([group] if together else [[pair] for pair in group])
    return sorted(groups)


def take(states: Tensor, columns: Tensor) -> Tensor:
    """[R, C, ...], these columns [C] of states [R, L, ...]. A column may be taken several times, such as the last of
    a prompt that responses share.

    Their gradients are added in the same order at each call: on a CPU with several threads, the backward pass of an
    index adds those of equal columns in any order. On a GPU it sorts them, and that of index_select does not.
    """
    return states.index_select(1, columns) if states.is_cpu else states[:, columns]
