"""Requests for samples: each has a number, a prompt and a seed."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def training_requests(
    config: OrchestratorConfig, prompts: PromptStream, first: int, count: int
) -> list[SampleRequest]:
    """The samples `first` to `first + count - 1` of a run.

    Their seeds are drawn in blocks of batch_size: number n has draw n % batch_size of block n // batch_size + 1.
    """
    numbers, block = range(first, first + count), config.batch_size
    draws = {which: _draws(config, which + 1, block) for which in {number // block for number in numbers}}
    seeds = [draws[number // block][number % block] for number in numbers]
    return [SampleRequest(*each) for each in zip(numbers, prompts.dealt(first, count), seeds, strict=True)]


def evaluation_requests(config: OrchestratorConfig, prompts: Sequence[Prompt]) -> list[SampleRequest]:
    """Requests for the configured number of samples of each prompt, with the seeds that all evaluations share."""
    repeated = [prompt for prompt in prompts for _ in range(config.evaluation.samples_per_prompt)]
    seeds = _draws(config, EVALUATION, len(repeated))
    return [SampleRequest(*each) for each in zip(range(len(repeated)), repeated, seeds, strict=True)]


def _draws(config: OrchestratorConfig, block: int, count: int) -> list[int] | list[None]:
    """The seeds of a block; all None if requests are not seeded."""
    if not config.sampling.seeded:
        return [None] * count
    draws = np.random.SeedSequence([config.seed, block]).generate_state(count, np.uint64)
    return [int(draw >> 1) for draw in draws]
