"""A prompt and its response as text, the input of function scorers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCORE = "score"
"""Name of the score of a pair where it has one alone."""
LEAST_S = 0.05
"""Shortest time, in seconds, that a caller may give a pair: one that is too short costs a process each."""


@dataclass(frozen=True, slots=True)
class ProcessReward:
    """A score of which parts are earned within the response, such as by the steps of a solution. A function scorer
    with `process: true` may return it for a pair in the place of a number."""

    score: float
    """Earned at the end of the response. The score of the pair is the sum of this and all parts."""
    parts: Sequence[tuple[int, float]]
    """Number of characters of `Pair.response`, from 1 on, and a reward, for each part: it is earned with the last of
    these characters. Parts of one number add up."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and a response as text, as function scorers and judges see them.

    A function scorer has the signature `def name(pairs: Sequence[Pair]) -> list[float]`: one score per pair,
    in the order of the pairs; or, with names for several scores, `-> list[dict[str, float]]`. In the place of a score
    it may return None, where it does not apply to the pair, an Unscored (quartet/wire/outcomes.py), or with
    `process: true` a ProcessReward.
    """

    prompt: str
    """The prompt without special tokens."""
    response: str
    """The response without special tokens; where an environment answered, all that followed the prompt."""
    label: str = ""
    """The data set's label for the prompt (`data.label_key`), empty when there is none; of another label than a text,
    such as a list, its JSON."""
    ended: bool = True
    """The response ended with an end-of-sequence or stop token, and was not cut off by the length limit."""
    texts: tuple[str, ...] = ()
    """The parts of `response` where an environment answered: a response, the answer, another response."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation as chat messages, each with `role` and `content`, the response last, where the caller sent
    such."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the caller sent of the pair, such as the other columns of the data set's row: values of JSON."""
    group: int | None = None
    """The same number for all responses to one prompt, and for no others: it is made of the number that the caller
    sent, its identity, the name that it declares and its purpose. None where it sent none. Pairs of a group may come
    in several calls of the function."""
    timeout_s: float | None = None
    """The longest time, in seconds, that the caller wants to be spent on the pair; None: as long as the scorer may
    take."""

    @property
    def last(self) -> str:
        """The last response."""
        return self.texts[-1] if self.texts else self.response


def label_of(value: Any) -> str:
    """A data set's label as the text of `Pair.label`: a text as it is, any other value as JSON, where a time or
    another value that JSON lacks is the text that Python makes of it; empty for None."""
    if value is None or isinstance(value, str):
        return value or ""
    known = isinstance(value, bool | int | float | list | Mapping)
    return json.dumps(value, ensure_ascii=False, default=str) if known else str(value)
