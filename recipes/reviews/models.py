"""The demo's policy and reward model, from random weights to files."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.common.llama import MAX_LENGTH, load_tiny, write_tiny
from recipes.common.sampling import EncodedPair, sample
from recipes.common.stages import Stages
from recipes.common.tokenizer import word_tokenizer
from recipes.common.training import quiet_and_seeded, train
from recipes.reviews import gold
from recipes.reviews.grammar import WORDS, Prompt, write_review
from recipes.reviews.preferences import Preference, collect
from recipes.reviews.reward_model import reward_scores, train_reward_model
from recipes.reviews.settings import Settings


def make_models(
    directory: Path, prompts: Sequence[Prompt], held_out: Sequence[Prompt], settings: Settings, stages: Stages
) -> dict[str, float]:
    """Writes policy/ and reward/ into `directory`; returns their measures, taken on `held_out`.

    The held-out prompts come last, so that what is written does not depend on them in any way.
    """
    quiet_and_seeded(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = word_tokenizer(WORDS, MAX_LENGTH)
    policy_folder, reward_folder = directory / "policy", directory / "reward"
    with stages("policy: supervised"), TemporaryDirectory() as base:
        start, rate = write_tiny(Path(base) / "policy", tokenizer, settings.shape), settings.supervised_rate
        rows, size = _written(prompts, settings, rng), settings.supervised_batch
        train("sft", start, rows, policy_folder, rate, batch_size=size, shuffle=False, seed=settings.seed)
    policy = load_tiny(policy_folder)
    with stages("preferences"):
        preferences = collect(policy, tokenizer, prompts, settings.preferences, settings, rng)
    with stages("reward model"):
        train_reward_model(policy_folder, preferences, reward_folder, settings)
    with stages("measures"):
        unseen = collect(policy, tokenizer, held_out, settings.measured, settings, rng)
        return _measure(reward_folder, unseen, _respond(policy, tokenizer, held_out, settings, rng))


def _written(prompts: Sequence[Prompt], settings: Settings, rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(settings.supervised_steps):
        for prompt in rng.choices(prompts, k=settings.supervised_batch):
            yield {"prompt": prompt.text, "response": write_review(prompt, settings.style, rng)}


def _respond(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    settings: Settings,
    rng: random.Random,
) -> list[EncodedPair]:
    texts = [prompt.text for prompt in rng.choices(prompts, k=settings.measured)]
    return sample(policy, tokenizer, texts, settings.max_new_tokens)


def _measure(folder: Path, preferences: Sequence[Preference], samples: Sequence[EncodedPair]) -> dict[str, float]:
    chosen = reward_scores(folder, [preference.chosen for preference in preferences])
    rejected = reward_scores(folder, [preference.rejected for preference in preferences])
    truth = np.asarray([preference.margin > 0 for preference in preferences])
    golds = gold.score([sample.pair for sample in samples])
    with np.errstate(invalid="ignore"):  # NaN where all are worth the same
        correlation = np.corrcoef(reward_scores(folder, samples), golds)[0, 1]
    return {
        "reward_accuracy": float(((chosen > rejected) == truth).mean()),
        "reward_gold_correlation": float(correlation),
        "policy_gold": float(np.mean(golds)),
    }
