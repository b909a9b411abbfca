"""The gold scorer: what a review is truly worth. It judges; nothing is trained on it.

A review's worth is the mean over its sentences of

- -1 for a sentence outside the grammar;
- else the adjective's polarity (+1 praise, 0 neither, -1 blame), which with f > 0 faults becomes
  min(polarity, 0) - f / 4. Faults: the sentence is about no aspect of the product or its adjective belongs to
  another aspect; an earlier sentence was about the same aspect.

Off that mean come 1/2 when the review does not end properly (an unfinished last sentence, or cut off by the
length limit) and 1/4 when it has fewer than 2 or more than 4 finished sentences. The result is clamped to
[-1, 1]; a review without a finished sentence is worth -1.
"""

from collections.abc import Sequence

from quartet.wire.pairs import Pair
from recipes.reviews.grammar import OPINIONS, PRODUCTS, Prompt, Sentence

FAULT = 0.25
BAD_ENDING = 0.5
BAD_LENGTH = 0.25
LENGTHS = range(2, 5)


def score(pairs: Sequence[Pair]) -> list[float]:
    """The worth of each pair's review, in [-1, 1]; raises ValueError for a prompt that asks for no review."""
    return [_worth(pair) for pair in pairs]


def _worth(pair: Pair) -> float:
    product = Prompt.parse(pair.prompt).product
    *sentences, rest = _split_sentences(pair.response)
    if not sentences:
        return -1.0
    worth = sum(_sentence_scores(sentences, product)) / len(sentences)
    if rest or not pair.ended:
        worth -= BAD_ENDING
    if len(sentences) not in LENGTHS:
        worth -= BAD_LENGTH
    return max(-1.0, min(1.0, worth))


def _split_sentences(review: str) -> list[list[str]]:
    """The words before each full stop, and last the words after the last one."""
    sentences: list[list[str]] = [[]]
    for word in review.split():
        if word == ".":
            sentences.append([])
        else:
            sentences[-1].append(word)
    return sentences


def _sentence_scores(sentences: Sequence[Sequence[str]], product: str) -> list[float]:
    scores: list[float] = []
    seen: set[str] = set()
    for words in sentences:
        sentence = Sentence.parse(words)
        if sentence is None:
            scores.append(-1.0)
            continue
        opinion = OPINIONS[sentence.adjective]
        off_topic = sentence.aspect not in PRODUCTS[product] or opinion.aspect not in (None, sentence.aspect)
        faults = off_topic + (sentence.aspect in seen)
        seen.add(sentence.aspect)
        scores.append(min(opinion.polarity, 0) - FAULT * faults if faults else opinion.polarity)
    return scores
