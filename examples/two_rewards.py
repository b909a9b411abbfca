"""A reward of two named scores: whether the answer is right, and how brief it is.

    reward: {kind: function, function: "examples.two_rewards:score", names: [right, brief]}
    algorithm:
      rewards:
        right: {weight: 1.0}
        brief: {weight: [[1, 0.0], [50, 0.3]], clip: 1.0}    # from nothing at step 1 to 0.3 at step 50

What each counts is said by the algorithm, so that weights are changed without this file.
"""

from collections.abc import Sequence

from quartet.wire.pairs import Pair


def score(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    """For each pair `right`, 1 if the prompt's label is a word of the response and else 0; and `brief`, which falls
    by 0.1 with each word, and by 1 where the response was cut off."""
    words = [pair.response.split() for pair in pairs]
    return [
        {"right": float(pair.label in said), "brief": -0.1 * len(said) - (not pair.ended)}
        for pair, said in zip(pairs, words, strict=True)
    ]
