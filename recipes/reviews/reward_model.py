"""A reward model learned from preferences."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from quartet.columns import Columns
from quartet.models.frozen_passes import FrozenPasses
from quartet.models.scalar import load_scalar, scores_of
from quartet.wire.codec import Floats
from recipes.common.sampling import EncodedPair
from recipes.common.training import train
from recipes.reviews.preferences import Preference
from recipes.reviews.settings import Settings

_TOKENS = 16_384
"""Most tokens of a pass."""


def train_reward_model(policy: Path, preferences: Sequence[Preference], save: Path, settings: Settings) -> None:
    """Trains the policy's body under a new head to score the chosen response higher than the other, by
    `quartet reward-model`."""
    rows = (
        {"prompt": each.chosen.pair.prompt, "chosen": each.chosen.written, "rejected": each.rejected.written}
        for each in preferences
    )
    train(
        "reward-model",
        policy,
        rows,
        save,
        settings.reward_rate,
        data={"append_eos": False},
        epochs=settings.reward_epochs,
        batch_size=settings.reward_batch,
        seed=settings.seed,
    )


@torch.no_grad()
def reward_scores(folder: Path, samples: Sequence[EncodedPair]) -> Floats:
    """Scores [N] of N samples, not normalised."""
    model = load_scalar(str(folder), "float32").eval()
    passes = FrozenPasses(_TOKENS, torch.device("cpu"), packing=False, last=True)
    pairs = Columns.of_pairs([each.prompt_ids for each in samples], [each.response_ids for each in samples])
    return np.concatenate(passes.run(lambda tensors: list(scores_of(model, tensors).numpy()[:, None]), pairs))
