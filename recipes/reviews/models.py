"""The demo's policy and reward model, from random weights to files."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from quartet.wire.pairs import Pair
from recipes.common.llama import MAX_LENGTH, tiny_policy
from recipes.common.sampling import EncodedPair, sample
from recipes.common.schedule import Schedule
from recipes.common.stages import Stages
from recipes.common.supervised import fine_tune
from recipes.common.tokenizer import word_tokenizer
from recipes.common.training import quiet_and_seeded
from recipes.reviews import gold
from recipes.reviews.grammar import WORDS, Prompt, write_review
from recipes.reviews.preferences import Preference, collect
from recipes.reviews.reward_model import reward_model_from, reward_scores, train_reward_model
from recipes.reviews.settings import Settings


def make_models(
    directory: Path, train: Sequence[Prompt], held_out: Sequence[Prompt], settings: Settings, stages: Stages
) -> dict[str, float]:
    """Writes policy/ and reward/ into `directory`; returns their measures, taken on `held_out`.

    The held-out prompts come last, so that what is written does not depend on them in any way.
    """
    quiet_and_seeded(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = word_tokenizer(WORDS, MAX_LENGTH)
    policy = tiny_policy(len(tokenizer), settings.shape)
    with stages("policy: supervised"):
        schedule = Schedule(settings.supervised_steps, settings.supervised_rate, warmup=20, floor=0.1)
        fine_tune(policy, tokenizer, _written(train, settings, rng), schedule)
    with stages("preferences"):
        preferences = collect(policy, tokenizer, train, settings.preferences, settings, rng)
    reward_model = reward_model_from(policy, settings)
    with stages("reward model"):
        train_reward_model(reward_model, preferences, settings, rng)
    with stages("measures"):
        _set_scale(reward_model, _respond(policy, tokenizer, train, settings, rng))
        unseen = collect(policy, tokenizer, held_out, settings.measured, settings, rng)
        measures = _measure(reward_model, unseen, _respond(policy, tokenizer, held_out, settings, rng))
    for model, name in ((policy, "policy"), (reward_model, "reward")):
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return measures


def _written(prompts: Sequence[Prompt], settings: Settings, rng: random.Random) -> Iterator[list[Pair]]:
    for _ in range(settings.supervised_steps):
        asked = rng.choices(prompts, k=settings.supervised_batch)
        yield [Pair(prompt.text, write_review(prompt, settings.style, rng)) for prompt in asked]


def _respond(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    settings: Settings,
    rng: random.Random,
) -> list[EncodedPair]:
    texts = [prompt.text for prompt in rng.choices(prompts, k=settings.measured)]
    return sample(policy, tokenizer, texts, settings.max_new_tokens)


def _set_scale(model: LlamaForSequenceClassification, samples: Sequence[EncodedPair]) -> None:
    scores = reward_scores(model, samples)
    model.config.reward_mean = scores.mean().item()
    model.config.reward_std = scores.std().item()


def _measure(
    model: LlamaForSequenceClassification, preferences: Sequence[Preference], samples: Sequence[EncodedPair]
) -> dict[str, float]:
    chosen = reward_scores(model, [preference.chosen for preference in preferences])
    rejected = reward_scores(model, [preference.rejected for preference in preferences])
    truth = torch.tensor([preference.margin > 0 for preference in preferences])
    golds = torch.tensor(gold.score([sample.pair for sample in samples]))
    together = torch.stack([reward_scores(model, samples), golds])
    return {
        "reward_accuracy": ((chosen > rejected) == truth).float().mean().item(),
        "reward_gold_correlation": torch.corrcoef(together)[0, 1].item(),
        "policy_gold": golds.mean().item(),
    }
