"""A reward model learned from preferences."""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from recipes.common.batch import pad_right
from recipes.common.llama import tiny_config
from recipes.common.sampling import EncodedPair
from recipes.common.schedule import Schedule
from recipes.common.training import fit
from recipes.reviews.preferences import Preference
from recipes.reviews.settings import Settings


def reward_model_from(policy: LlamaForCausalLM, settings: Settings) -> LlamaForSequenceClassification:
    """The policy's body under a new head with one output."""
    config = tiny_config(policy.config.vocab_size, settings.shape, num_labels=1)
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(policy.model.state_dict())
    return model


def raw_scores(model: LlamaForSequenceClassification, samples: Sequence[EncodedPair]) -> Tensor:
    """Scores [N]: the head's output at the last token of each of N samples."""
    ids, mask = pad_right([sample.ids for sample in samples])
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(samples)), mask.sum(1) - 1]
    scores: Tensor = model.score(last).squeeze(-1)
    return scores


def reward_scores(model: LlamaForSequenceClassification, samples: Sequence[EncodedPair]) -> Tensor:
    """`raw_scores` [N] of a model that is not being trained."""
    with torch.no_grad():
        return raw_scores(model, samples)


def train_reward_model(
    model: LlamaForSequenceClassification,
    preferences: Sequence[Preference],
    settings: Settings,
    rng: random.Random,
) -> float:
    """Minimises -log sigmoid(score of chosen - score of rejected); returns the last batch's loss.

    Bradley-Terry likelihood as in Ouyang et al. (2022), equation 1.
    """

    def loss_of(batch: Sequence[Preference]) -> Tensor:
        samples = [preference.chosen for preference in batch] + [preference.rejected for preference in batch]
        chosen, rejected = raw_scores(model, samples).chunk(2)
        return -functional.logsigmoid(chosen - rejected).mean()

    steps = settings.reward_epochs * (len(preferences) // settings.reward_batch)
    return fit(model, _batches(preferences, settings, rng), loss_of, Schedule(steps, settings.reward_rate))


def _batches(
    preferences: Sequence[Preference], settings: Settings, rng: random.Random
) -> Iterator[Sequence[Preference]]:
    """Whole batches only: a small last one would have the weight of a full one."""
    size = settings.reward_batch
    for _ in range(settings.reward_epochs):
        shuffled = rng.sample(preferences, k=len(preferences))
        for start in range(0, len(shuffled) - size + 1, size):
            yield shuffled[start : start + size]
