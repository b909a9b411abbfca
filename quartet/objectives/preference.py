"""Reward models: which of two answers is preferred."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from quartet.learner.objective import Micro, Objective, Terms
from quartet.learner.reductions import Reduction
from quartet.models.scalar import scores_of


@dataclass(frozen=True)
class Preference(Objective):
    """-log sigmoid(score of the chosen - score of the rejected answer), in the mean over comparisons: the likelihood
    of Bradley and Terry (1952) as in Ouyang et al. 2022 (arXiv:2203.02155), eq. 1.

    The model is a ScalarModel. Each two trajectories that follow each other are a chosen and a rejected answer to one
    prompt. A score is of a whole trajectory, so that `trained` has no place in the batch.
    """

    reduction: Reduction = "trajectories"
    group: ClassVar[int] = 2
    last: ClassVar[bool] = True

    def __call__(self, model: Any, micro: Micro) -> Terms:
        """`loss`, and `accuracy`, the share of comparisons whose chosen answer has the higher score."""
        scores = scores_of(model, micro.pairs)
        chosen, rejected = scores[::2], scores[1::2]
        share = 1 / (micro.trajectories / 2) if micro.rows else 0.0
        loss = -functional.logsigmoid(chosen - rejected).sum() * share
        right = (chosen > rejected).to(torch.float32).sum() * share
        return Terms(loss, {"loss": loss, "accuracy": right})
