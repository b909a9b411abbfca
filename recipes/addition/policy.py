"""A policy that has learned to add from careless answers."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from quartet.wire.pairs import Pair
from recipes.addition.problems import CHARACTERS, Problem, careless_answer
from recipes.addition.reward import score
from recipes.addition.settings import Settings
from recipes.common.llama import MAX_LENGTH, tiny_policy
from recipes.common.sampling import sample
from recipes.common.schedule import Schedule
from recipes.common.stages import Stages
from recipes.common.supervised import fine_tune
from recipes.common.tokenizer import character_tokenizer
from recipes.common.training import quiet_and_seeded


def make_policy(
    directory: Path,
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    settings: Settings,
    stages: Stages,
) -> dict[str, float]:
    """Writes policy/ into `directory`; returns mean score and share of exact sums, sampled on `held_out`."""
    quiet_and_seeded(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = character_tokenizer(CHARACTERS, MAX_LENGTH)
    policy = tiny_policy(len(tokenizer), settings.shape)
    with stages("policy: supervised"):
        schedule = Schedule(settings.steps, settings.rate, warmup=20, floor=0.1)
        fine_tune(policy, tokenizer, _answered(train, settings, rng), schedule)
    with stages("measures"):
        samples = sample(policy, tokenizer, [problem.text for problem in held_out], settings.max_new_tokens)
        answered = zip(samples, held_out, strict=True)
        scores = score([replace(one.pair, label=problem.label) for one, problem in answered])
    policy.save_pretrained(directory / "policy")
    tokenizer.save_pretrained(directory / "policy")
    return {
        "policy_reward": sum(scores) / len(scores),
        "policy_exact": sum(one == 1.0 for one in scores) / len(scores),
    }


def _answered(problems: Sequence[Problem], settings: Settings, rng: random.Random) -> Iterator[list[Pair]]:
    for step in range(settings.steps):
        slip = settings.slip if step >= settings.careful * settings.steps else 0.0
        asked = rng.choices(problems, k=settings.batch)
        yield [Pair(problem.text, careless_answer(problem, slip, rng)) for problem in asked]
