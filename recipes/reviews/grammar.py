"""The small language of product reviews: its words, its prompts, and sentences with an opinion."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as combinations
from typing import Self

TONES = ("short", "honest", "quick", "useful", "simple", "frank")
AUDIENCES = ("students", "parents", "travelers", "experts")
VERBS = ("is", "feels", "seems")
ADVERBS = ("very", "really", "quite")
NEUTRAL = ("okay", "average")

PRAISE = {
    "battery": ("durable", "lasting"),
    "screen": ("bright", "crisp"),
    "sound": ("clear", "rich"),
    "price": ("fair", "cheap"),
    "fabric": ("soft", "cozy"),
    "zipper": ("smooth", "sturdy"),
    "taste": ("tasty", "fresh"),
    "smell": ("pleasant", "lovely"),
    "handle": ("solid", "comfy"),
    "motor": ("quiet", "strong"),
    "wheels": ("fast", "stable"),
    "cover": ("pretty", "neat"),
}
BLAME = {
    "battery": ("weak", "dying"),
    "screen": ("dim", "blurry"),
    "sound": ("tinny", "muffled"),
    "price": ("steep", "absurd"),
    "fabric": ("itchy", "thin"),
    "zipper": ("stuck", "flimsy"),
    "taste": ("bland", "stale"),
    "smell": ("foul", "musty"),
    "handle": ("loose", "slippery"),
    "motor": ("noisy", "feeble"),
    "wheels": ("wobbly", "squeaky"),
    "cover": ("ugly", "torn"),
}
ASPECTS = tuple(PRAISE)
PRODUCTS = {
    "phone": ("battery", "screen", "sound", "price"),
    "laptop": ("battery", "screen", "price", "cover"),
    "radio": ("battery", "sound", "price", "handle"),
    "speaker": ("sound", "battery", "cover", "price"),
    "jacket": ("fabric", "zipper", "price", "smell"),
    "backpack": ("fabric", "zipper", "handle", "price"),
    "tent": ("fabric", "zipper", "cover", "smell"),
    "suitcase": ("zipper", "wheels", "handle", "cover"),
    "coffee": ("taste", "smell", "price", "cover"),
    "cake": ("taste", "smell", "price", "cover"),
    "blender": ("motor", "handle", "sound", "price"),
    "vacuum": ("motor", "wheels", "handle", "sound"),
    "scooter": ("motor", "wheels", "battery", "handle"),
    "stroller": ("wheels", "fabric", "handle", "price"),
    "candle": ("smell", "price", "cover", "sound"),
    "drone": ("motor", "battery", "screen", "price"),
}


@dataclass(frozen=True, slots=True)
class Opinion:
    """Meaning of an adjective: its aspect (None: any), and +1 for praise, 0 for neither, -1 for blame."""

    aspect: str | None
    polarity: int


OPINIONS = (
    {word: Opinion(aspect, 1) for aspect, words in PRAISE.items() for word in words}
    | {word: Opinion(aspect, -1) for aspect, words in BLAME.items() for word in words}
    | {word: Opinion(None, 0) for word in NEUTRAL}
)

WORDS = tuple(
    sorted(
        {"write", "a", "review", "of", "the", "for", ":", "."}.union(
            TONES, PRODUCTS, AUDIENCES, ASPECTS, VERBS, ADVERBS, OPINIONS
        )
    )
)
"""Every word of the language, sorted."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for a review. Only the product decides which review is good."""

    tone: str
    product: str
    audience: str

    @property
    def text(self) -> str:
        return f"write a {self.tone} review of the {self.product} for {self.audience} :"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The prompt that reads as `text`; raises ValueError when there is none."""
        match = re.fullmatch(r"write a (\w+) review of the (\w+) for (\w+) :", text.strip())
        if match is None or match[1] not in TONES or match[2] not in PRODUCTS or match[3] not in AUDIENCES:
            example = cls(TONES[0], next(iter(PRODUCTS)), AUDIENCES[0]).text
            raise ValueError(f"prompt: {text!r} asks for no review known here; one that does: {example!r}")
        return cls(*match.groups())


@dataclass(frozen=True, slots=True)
class Sentence:
    """One opinion, such as `the battery feels very durable`."""

    aspect: str
    verb: str
    adverb: str | None
    adjective: str

    @property
    def text(self) -> str:
        """The sentence with its full stop."""
        return " ".join(filter(None, ("the", self.aspect, self.verb, self.adverb, self.adjective, ".")))

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self | None:
        """The sentence made of `words` (without the full stop), or None when they are not one."""
        match words:
            case ["the", aspect, verb, adjective]:
                adverb = None
            case ["the", aspect, verb, adverb, adjective] if adverb in ADVERBS:
                pass
            case _:
                return None
        known = aspect in ASPECTS and verb in VERBS and adjective in OPINIONS
        return cls(aspect, verb, adverb, adjective) if known else None


@dataclass(frozen=True, slots=True)
class Style:
    """A writer's way with a review; each number is a probability."""

    praise: float = 0.5
    """An opinion that takes sides is praise and not blame."""
    slip: float = 0.15
    """The aspect is picked from all aspects rather than the product's; likewise the adjective's aspect."""
    neutral: float = 0.2
    """The adjective takes no side."""


def split_prompts(seed: int, held_out: float) -> tuple[list[Prompt], list[Prompt]]:
    """All prompts, shuffled by `seed` and cut into (train, eval); eval gets the share `held_out` of them."""
    prompts = [Prompt(*words) for words in combinations(TONES, PRODUCTS, AUDIENCES)]
    random.Random(seed).shuffle(prompts)
    cut = round(len(prompts) * held_out)
    return prompts[cut:], prompts[:cut]


def write_review(prompt: Prompt, style: Style, rng: random.Random) -> str:
    """A review of two to four sentences, written in `style`."""
    return " ".join(_write_sentence(prompt.product, style, rng).text for _ in range(rng.randint(2, 4)))


def _write_sentence(product: str, style: Style, rng: random.Random) -> Sentence:
    aspect = rng.choice(ASPECTS if rng.random() < style.slip else PRODUCTS[product])
    meant = rng.choice(ASPECTS) if rng.random() < style.slip else aspect
    if rng.random() < style.neutral:
        adjectives = NEUTRAL
    else:
        adjectives = (PRAISE if rng.random() < style.praise else BLAME)[meant]
    adverb = rng.choice(ADVERBS) if rng.random() < 0.5 else None
    return Sentence(aspect, rng.choice(VERBS), adverb, rng.choice(adjectives))
