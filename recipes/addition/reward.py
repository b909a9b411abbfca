"""The rule: how right an answer is.

-  1    the sum, digit for digit, and then the end
-  s/2  another number of as many digits and then the end; s is the share of its digits that are right
- -1    anything else: no number, one too short or too long, or no end
"""

from collections.abc import Sequence

from quartet.wire.pairs import Pair


def score(pairs: Sequence[Pair]) -> list[float]:
    """The rule's score of each pair, in [-1, 1]; raises ValueError for a label that is not a decimal number."""
    return [_score(pair) for pair in pairs]


def _score(pair: Pair) -> float:
    if not _is_number(pair.label):
        raise ValueError(f"label: must be the sum {pair.prompt!r} in digits, not {pair.label!r}")
    answer = pair.response.strip()
    if not pair.ended or not _is_number(answer) or len(answer) != len(pair.label):
        return -1.0
    if answer == pair.label:
        return 1.0
    right = sum(given == due for given, due in zip(answer, pair.label, strict=True))
    return 0.5 * right / len(answer)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
