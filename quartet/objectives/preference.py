"""Reward models: which of two answers is preferred."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from quartet.columns import Field, Schema
from quartet.learner.objective import Micro, Objective, Terms
from quartet.learner.reductions import Reduction
from quartet.models.scalar import scores_of


@dataclass(frozen=True)
class Preference(Objective):
    """-log sigmoid(chosen - rejected - margin) + centring * (chosen + rejected)^2 of the scores of both answers, in
    the mean over comparisons: the likelihood of Bradley and Terry (1952) as in Ouyang et al. 2022 (arXiv:2203.02155),
    eq. 1, with the margin of Touvron et al. 2023 (arXiv:2307.09288), eq. 2, and the centring of Eisenstein et al.
    2023 (arXiv:2312.09244).

    The model is a ScalarModel. Each two trajectories that follow each other are a chosen and a rejected answer to one
    prompt. A score is of a whole trajectory, so that `trained` has no place in the batch.
    """

    columns: ClassVar[Schema] = {"margin": Field("row", optional=True)}
    """`margin`: by how much the chosen answer's score is to exceed the other's, at the chosen one; 0 without such a
    column."""

    centring: float = 0.0
    """Weight of the squared sum of both scores, which keeps them near 0: comparisons leave a shift open."""
    reduction: Reduction = "trajectories"
    group: ClassVar[int] = 2
    last: ClassVar[bool] = True

    def __call__(self, model: Any, micro: Micro) -> Terms:
        """`loss`; `accuracy`, the share of comparisons whose chosen answer has the higher score; and `difference`,
        the mean of chosen - rejected."""
        scores = scores_of(model, micro.pairs)
        chosen, rejected = scores[::2], scores[1::2]
        share = 1 / (micro.trajectories / 2) if micro.rows else 0.0
        ahead = chosen - rejected
        due = ahead - micro.columns["margin"][::2] if "margin" in micro.columns else ahead
        loss = -functional.logsigmoid(due).sum() * share
        loss = loss + self.centring * (chosen + rejected).square().sum() * share
        right = (chosen > rejected).to(torch.float32).sum() * share
        return Terms(loss, {"loss": loss, "accuracy": right, "difference": ahead.sum() * share})
