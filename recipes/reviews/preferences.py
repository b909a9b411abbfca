"""Pairs of reviews and which of the two a reader prefers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quartet.wire.pairs import Pair
from recipes.common.sampling import EncodedPair, encode, sample
from recipes.reviews import gold
from recipes.reviews.grammar import Prompt, Style, write_review
from recipes.reviews.settings import Settings

ROUND = 512
"""Prompts answered at a time; small beside the pairs of the demo, since the last round is cut short."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, as labelled by a reader who errs."""

    chosen: EncodedPair
    rejected: EncodedPair
    margin: float
    """Gold score of chosen minus rejected: negative where the reader erred."""


def prefer(
    first: Sequence[EncodedPair], second: Sequence[EncodedPair], sharpness: float, rng: random.Random
) -> list[Preference]:
    """One preference for each two samples of unequal gold score, in order.

    `first` is chosen with probability sigmoid(sharpness * (gold of first - gold of second)): the model of
    Bradley and Terry (1952), with the gold score as the strength.
    """
    preferences = []
    golds = zip(*(gold.score([sample.pair for sample in side]) for side in (first, second)), strict=True)
    for one, other, (worth, other_worth) in zip(first, second, golds, strict=True):
        margin = worth - other_worth
        if margin == 0:
            continue
        if rng.random() < 1 / (1 + math.exp(-sharpness * margin)):
            preferences.append(Preference(one, other, margin))
        else:
            preferences.append(Preference(other, one, -margin))
    return preferences


def collect(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    count: int,
    settings: Settings,
    rng: random.Random,
) -> list[Preference]:
    """`count` preferences on random `prompts`: the policy's review against another.

    Half of the others are the policy's too. The rest are written by the grammar, each in a style of its own,
    so that the reward model has also seen reviews much better and worse than the policy's: PPO will go there.
    """
    preferences: list[Preference] = []
    while len(preferences) < count:
        asked = rng.choices(prompts, k=ROUND)
        texts = [prompt.text for prompt in asked]
        first = sample(policy, tokenizer, texts, settings.max_new_tokens)
        second = sample(policy, tokenizer, texts[: ROUND // 2], settings.max_new_tokens)
        second += encode([_written(prompt, rng) for prompt in asked[ROUND // 2 :]], tokenizer)
        preferences += prefer(first, second, settings.sharpness, rng)
    return preferences[:count]


def _written(prompt: Prompt, rng: random.Random) -> Pair:
    style = Style(praise=rng.random(), slip=0.3 * rng.random(), neutral=0.3 * rng.random())
    return Pair(prompt.text, write_review(prompt, style, rng))
