"""A policy that has learned to add from careless answers."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from recipes.addition.problems import CHARACTERS, Problem, careless_answer
from recipes.addition.reward import score
from recipes.addition.settings import Settings
from recipes.common.llama import MAX_LENGTH, load_tiny, write_tiny
from recipes.common.sampling import sample
from recipes.common.stages import Stages
from recipes.common.tokenizer import character_tokenizer
from recipes.common.training import quiet_and_seeded, train


def make_policy(
    directory: Path,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    settings: Settings,
    stages: Stages,
) -> dict[str, float]:
    """Writes policy/ into `directory`; returns mean score and share of exact sums, sampled on `held_out`."""
    quiet_and_seeded(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = character_tokenizer(CHARACTERS, MAX_LENGTH)
    with stages("policy: supervised"), TemporaryDirectory() as base:
        rows, folder = _answered(problems, settings, rng), directory / "policy"
        start = write_tiny(Path(base) / "policy", tokenizer, settings.shape)
        train("sft", start, rows, folder, settings.rate, batch_size=settings.batch, shuffle=False, seed=settings.seed)
    with stages("measures"):
        samples = sample(
            load_tiny(folder), tokenizer, [problem.text for problem in held_out], settings.max_new_tokens
        )
        answered = zip(samples, held_out, strict=True)
        scores = score([replace(one.pair, label=problem.label) for one, problem in answered])
    return {
        "policy_reward": sum(scores) / len(scores),
        "policy_exact": sum(one == 1.0 for one in scores) / len(scores),
    }


def _answered(problems: Sequence[Problem], settings: Settings, rng: random.Random) -> Iterator[dict[str, str]]:
    for step in range(settings.steps):
        slip = settings.slip if step >= settings.careful * settings.steps else 0.0
        for problem in rng.choices(problems, k=settings.batch):
            yield {"prompt": problem.text, "response": careless_answer(problem, slip, rng)}
