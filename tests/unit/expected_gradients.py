"""Quartet's gradient in expectation over all responses of the problem with a known optimum.

The path is that of a run: samples become a batch, the learner's log-probs, estimates and the policy's optimizer step.
Two things differ. Every response is in the batch once, weighted by its probability; and the step's gradient is taken
down instead of being applied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.data.prompts import Prompt
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import Advantages, estimate_advantages, old_logprobs_of
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner.minibatches import minibatches
from quartet.models.distribution import Distribution
from quartet.wire.codec import Floats
from services.rollout.sample import FinishReason, Sample
from tests.unit import known_optimum as known
from tests.unit.algorithm_settings import plain
from tests.unit.experiences import Experience, collected
from tests.unit.known_optimum import BETA, COUNT, END, LENGTHS, MASK, MOST, PROMPTS, RESPONSES

DISTRIBUTION = Distribution(known.TEMPERATURE, vocabulary=known.TOKENS, end_ids=(END,))
WHOLE = {"epochs": 1, "minibatch_size": len(PROMPTS) * COUNT}
"""All responses in one minibatch."""


def parse(**algorithm: Any) -> Algorithm:
    """The algorithm as a file would give it, checked, in one minibatch and without whitening unless it is given."""
    return parse_algorithm(plain(algorithm, **WHOLE, score_clip=None))


@dataclass(frozen=True)
class Tables:
    """Numbers of all responses, in float64: each [2, 259, 3]."""

    logprobs: Tensor
    """log pi, with a gradient."""
    ref: Tensor
    behaviour: Tensor
    """Log-probs of the policy that samples."""
    values: Tensor
    """The critic's values of beginnings."""
    rewards: Tensor
    """[2, 259]"""

    def token_rewards(self, of: Tensor | None = None, beta: float = BETA) -> Tensor:
        """-beta times k1 at every token, by the log-probs `of` or else pi's, plus the score at the last."""
        penalty = torch.where(MASK, beta * ((self.logprobs if of is None else of).detach() - self.ref), 0.0)
        last = torch.arange(MOST) == LENGTHS[:, None] - 1
        return torch.where(last, self.rewards.unsqueeze(-1), 0.0) - penalty

    def to_go(self, of: Tensor | None = None) -> Tensor:
        """The rewards from each token to the end."""
        return torch.where(MASK, self.token_rewards(of).flip(-1).cumsum(-1).flip(-1), 0.0)


def experiences(tables: Tables, versions: Sequence[int] = (0,) * MOST) -> list[Experience]:
    """Every response to both prompts, in order, whose t-th tokens were sampled by the t-th version."""
    made: list[Experience] = []
    for index, prompt in enumerate(PROMPTS):
        asked = Prompt(index, np.asarray(prompt, np.int32), "", "")
        for row, response in enumerate(RESPONSES):
            length = len(response)

            def cut(table: Tensor, at: tuple[int, int, int] = (index, row, length)) -> Floats:
                row: Floats = table[at[0], at[1], : at[2]].detach().numpy().astype(np.float32)
                return row

            reason = FinishReason.STOP if response[-1] == END else FinishReason.LENGTH
            spans = tuple((version, t, t + 1) for t, version in enumerate(versions[:length]))
            sample = Sample(row, np.asarray(response, np.int32), cut(tables.behaviour), reason, spans)
            score = float(tables.rewards[index, row])
            made.append(Experience(len(made), asked, sample, score, cut(tables.ref), cut(tables.values)))
    return made


class Learner:
    """The policy's trainer, whose steps give their gradients and change nothing."""

    def __init__(self, folder: Path, algorithm: Algorithm, **layout: Any) -> None:
        optimizer = OptimizerConfig(learning_rate=1e-3)
        config = PolicyConfig(model=str(folder), optimizer=optimizer, **layout)
        self.algorithm = algorithm.sized(MOST)
        self.trainer = PolicyTrainer(config, self.algorithm, DISTRIBUTION)
        self._gradients: list[Tensor] = []
        self.trainer.learner._apply = self._take  # type: ignore[method-assign]

    def _take(self, totals: dict[str, Tensor]) -> dict[str, float]:
        module, engine = self.trainer.learner.module, self.trainer.learner._engine
        self._gradients.append(
            torch.cat([p.grad.double().view(-1) for p in module.parameters() if p.grad is not None])
        )
        engine.zero_grad()
        return {}  # as of a step that was skipped

    def estimate(
        self, rows: Sequence[Experience], oldest: int | None = None, kl_coef: float = BETA
    ) -> tuple[Batch, Advantages]:
        """The batch with the learner's log-probs, and the estimates for it."""
        batch = self.batch(rows, oldest)
        return batch, self.credited(batch, kl_coef)

    def credited(self, batch: Batch, kl_coef: float = BETA) -> Advantages:
        """The estimates for a batch with the learner's log-probs."""
        old = old_logprobs_of(batch, self.algorithm)
        return estimate_advantages(batch, old, self.algorithm, kl_coef, {}, step=1)

    def batch(self, rows: Sequence[Experience], oldest: int | None = None) -> Batch:
        """The batch with the learner's log-probs."""
        batch = Batch.of(collected(rows, each=self.algorithm.samples_per_prompt), oldest)
        return Batch.of(batch.collected.with_sampled(old_logprobs=self._logprobs(batch)), oldest)

    def _logprobs(self, batch: Batch) -> Floats:
        """The learner's log-probs; of each pair once, however often it is in the batch."""
        first: dict[tuple[int, bytes], int] = {}
        columns = batch.columns
        keys = [(row, ids.tobytes()) for row, ids in zip(columns["row"].tolist(), columns.responses, strict=True)]
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        rows = list(first.values())
        asked = columns.select().take(rows)
        answer = asked.with_sampled(logprobs=self.trainer.logprobs(asked)).rows("logprobs")
        known_rows = dict(zip(first, answer, strict=True))
        return np.concatenate([known_rows[key] for key in keys])

    def expected(self, batch: Batch, advantages: Floats, likely: Tensor, kl_coef: float = BETA) -> Tensor:
        """The gradient of the loss, negated, summed over tokens, in expectation: responses have the probabilities
        `likely` [2, 259]. Advantages are multiplied with them, since the loss is linear in them."""
        weights = np.repeat((likely / len(PROMPTS)).flatten().tolist(), batch.columns.counts)
        scaled = (advantages.astype(np.float64) * weights).astype(np.float32)
        self.trainer.train(batch.columns.with_sampled(advantages=scaled), kl_coef, seed=0)
        (gradient,) = self._gradients
        self._gradients = []
        return -gradient * int(batch.mask.sum())

    def expected_one_by_one(self, batch: Batch, advantages: Floats, likely: Tensor) -> Tensor:
        """The same where the loss has terms without advantages: each response is a minibatch of its own, and its
        gradient is multiplied with its probability."""
        assert self.algorithm.minibatch_size == 1
        self.trainer.train(batch.columns.with_sampled(advantages=advantages), BETA, seed=0)
        every = minibatches(len(batch), epochs=self.algorithm.epochs, size=1, seed=0)
        order = [row for (row,) in every if batch.mask[row].any()]
        weights = (likely / len(PROMPTS)).flatten()
        total = sum(float(weights[row]) * g for row, g in zip(order, self._gradients, strict=True))
        assert isinstance(total, Tensor)
        return -total * float(LENGTHS.double().mean())


def error(actual: Tensor, exact: Tensor) -> float:
    """Length of the difference, relative to the exact gradient's."""
    return float((actual - exact).norm() / exact.norm())
