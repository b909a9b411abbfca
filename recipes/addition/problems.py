"""Additions as prompts, with their sums as labels."""

import random
from dataclasses import dataclass

CHARACTERS = tuple("0123456789 +=")
"""Every character of a prompt or an answer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers to add, each and their sum of two digits: what a tiny model learns within seconds."""

    left: int
    right: int

    @property
    def text(self) -> str:
        return f"{self.left} + {self.right} ="

    @property
    def label(self) -> str:
        """The sum in decimal digits."""
        return str(self.left + self.right)


def split_problems(seed: int, train: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """`train` and `held_out` problems, picked by the seed, none of them twice.

    Raises ValueError when that is more than there are.
    """
    problems = [Problem(left, right) for left in range(10, 90) for right in range(10, 100 - left)]
    if train + held_out > len(problems):
        raise ValueError(f"train + held_out: {train} + {held_out} problems wanted, {len(problems)} exist")
    picked = random.Random(seed).sample(problems, k=train + held_out)
    return picked[:train], picked[train:]


def careless_answer(problem: Problem, slip: float, rng: random.Random) -> str:
    """The sum, but with probability `slip` one of its digits is replaced by another digit."""
    answer = problem.label
    if rng.random() >= slip:
        return answer
    at = rng.randrange(len(answer))
    wrong = rng.choice([digit for digit in "0123456789" if digit != answer[at]])
    return answer[:at] + wrong + answer[at + 1 :]
