"""Requests for samples: each has a number, a prompt and a seed."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self

import numpy as np

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt, PromptStream

EVALUATION = 2**31
"""Number of the block of seeds for evaluations, which no training samples use. All evaluations of a run share it, so
that results of two checkpoints differ by their weights and not by chance."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for one sample."""

    number: int
    """Number of samples that the run asked for before this one; 0 for the first. It identifies the sample in any
    batch, and prompt and seed follow from it."""
    prompt: Prompt
    """Prompt to respond to."""
    seed: int | None
    """Seed of the sampling; None for the engine's own."""
    group: int
    """Number of the first of the samples that respond to the same prompt together."""


@dataclass(frozen=True, slots=True)
class Used:
    """Numbers of the samples that a run has used up, by training on them or by discarding them with their groups: all
    below `below`, and those of `beyond`.

    0 1 2 5 7 were used:  below 3, beyond 5 and 7
    """

    below: int = 0
    beyond: frozenset[int] = frozenset()

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def plus(self, numbers: Iterable[int]) -> Self:
        """These numbers, and those before, as used."""
        beyond = self.beyond.union(numbers)
        below = next(number for number in count(self.below) if number not in beyond)
        return type(self)(below, frozenset(number for number in beyond if number >= below))

    def others(self, reserved: Collection[int]) -> Iterator[int]:
        """All other numbers that are not reserved either, ascending, without end."""
        return (number for number in count(self.below) if number not in self.beyond and number not in reserved)


def training_requests(
    config: OrchestratorConfig, prompts: PromptStream, numbers: Sequence[int]
) -> list[SampleRequest]:
    """The samples of a run with these numbers.

    Their seeds are drawn in blocks of batch_size: number n has draw n % batch_size of block n // batch_size + 1.
    """
    block = config.batch_size
    draws = {which: _draws(config, which + 1, block) for which in {number // block for number in numbers}}
    seeds = [draws[number // block][number % block] for number in numbers]
    dealt = [prompts.dealt(number) for number in numbers]
    groups = _groups(numbers, config.algorithm.samples_per_prompt)
    return [SampleRequest(*each) for each in zip(numbers, dealt, seeds, groups, strict=True)]


def calls(requests: Sequence[SampleRequest], size: int) -> list[Sequence[SampleRequest]]:
    """The requests in parts of `size`, in order; the last may be smaller."""
    return [requests[first : first + size] for first in range(0, len(requests), size)]


def evaluation_requests(config: OrchestratorConfig, prompts: Sequence[Prompt]) -> list[SampleRequest]:
    """Requests for the configured number of samples of each prompt, with the seeds that all evaluations share."""
    each = config.evaluation.samples_per_prompt
    repeated = [prompt for prompt in prompts for _ in range(each)]
    numbers, seeds = range(len(repeated)), _draws(config, EVALUATION, len(repeated))
    return [SampleRequest(*one) for one in zip(numbers, repeated, seeds, _groups(numbers, each), strict=True)]


def _groups(numbers: Iterable[int], each: int) -> list[int]:
    return [number - number % each for number in numbers]


def _draws(config: OrchestratorConfig, block: int, count: int) -> list[int] | list[None]:
    """The seeds of a block; all None if requests are not seeded."""
    if not config.sampling.seeded:
        return [None] * count
    draws = np.random.SeedSequence([config.seed, block]).generate_state(count, np.uint64)
    return [int(draw >> 1) for draw in draws]
