"""The rule: how right an answer is.

-  1    the sum, digit for digit, and then the end
-  s/2  another number of as many digits, the share s of which are right, each in its place
-  0    any other number of at most MAX_DIGITS digits
- -1    anything else: no number, a longer one, or no end
"""

from collections.abc import Sequence

from services.common.pairs import Pair

MAX_DIGITS = 3
"""Digits of the largest sum, 198. A longer answer is rubbish, so that there is nothing to gain by rambling on."""


def score(pairs: Sequence[Pair]) -> list[float]:
    """The rule's score of each pair, in [-1, 1]; raises ValueError for a label that is no sum in decimal digits."""
    return [_score(pair) for pair in pairs]


def _score(pair: Pair) -> float:
    if not _is_number(pair.label):
        raise ValueError(f"label: must be the sum of {pair.prompt!r} in at most {MAX_DIGITS} digits, not {pair.label!r}")
    answer = pair.response.strip()
    if not pair.ended or not _is_number(answer):
        return -1.0
    if answer == pair.label:
        return 1.0
    if len(answer) != len(pair.label):
        return 0.0
    right = sum(given == due for given, due in zip(answer, pair.label, strict=True))
    return 0.5 * right / len(answer)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
