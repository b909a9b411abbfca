"""Reductions: how the losses of a minibatch's tokens become one number. Pure functions over counts of tokens.

A minibatch's loss is a sum over tokens, divided by a denominator of the whole minibatch and multiplied by its weight
in the batch. With T_i trained tokens in response i, n responses that have one, and l_it the loss of token t:

    tokens        sum_it l_it / sum_i T_i         a token counts as any other (DAPO, arXiv:2503.14476)
    trajectories  sum_i (sum_t l_it / T_i) / n    a response counts as any other (GRPO, arXiv:2402.03300)
    L             sum_it l_it / (L n)             as with tokens, of n L (Dr. GRPO, arXiv:2503.20783)

All three are the mean over tokens with a factor for the tokens of each response, see `factors`. Micro-batches and
ranks add up to the same gradient however a minibatch is divided, since every denominator is that of the whole; and
the minibatches of an epoch have the reduction over the whole batch as their mean, see `units`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

Reduction = Literal["tokens", "trajectories"] | Annotated[int, Field(ge=1)]
"""The mean over tokens, over responses of their means, or over responses of their sums divided by this length."""


def units(reduction: Reduction, counts: Sequence[int]) -> Sequence[int]:
    """Share of each response in the denominator: its trained tokens, or 1 if it has any. [B] -> [B]."""
    return counts if reduction == "tokens" else [int(count > 0) for count in counts]


def factors(reduction: Reduction, counts: Sequence[int]) -> list[float] | None:
    """Factors of the tokens of each response of a minibatch, by which the mean over its tokens becomes the reduction:
    of the same mean for all tokens, so None, with `tokens`.

    For example responses with 1 and 3 trained tokens have the factors 2 and 2/3 with `trajectories`, as 2 l_1 / 4 is
    half of l_1, and (2/3) (l_1 + l_2 + l_3) / 4 half of their mean; with a length of 2 both have 1.

    Args:
        reduction: the reduction.
        counts: trained tokens of each response of the whole minibatch, [B]; at least one has some.
    """
    if reduction == "tokens":
        return None
    tokens, responses = sum(counts), sum(units(reduction, counts))
    if reduction == "trajectories":
        return [tokens / (responses * count) if count else 0.0 for count in counts]
    return [tokens / (responses * reduction)] * len(counts)
