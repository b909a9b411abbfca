"""Training on sampled responses of the problem with a known optimum, by Quartet's own estimates and trainers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.algorithms.contract import Group
from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import estimate_advantages
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import PolicyConfig
from quartet.wire.pairs import SCORE
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.learner_batches import logprob_rows, value_rows
from tests.unit import known_optimum as known
from tests.unit.expected_gradients import DISTRIBUTION, Tables, experiences
from tests.unit.experiences import Experience, collected
from tests.unit.known_optimum import COUNT, MOST, PROMPTS, RESPONSES

BATCH, MINIBATCH = 1024, 256


class Learning:
    """A policy that starts as its own reference, and its critic if the estimate needs one."""

    def __init__(
        self,
        folder: Path,
        algorithm: dict[str, Any],
        rewards: Tensor,
        *,
        steps: int,
        rate: float,
        seed: int = 0,
        reference: Tensor | None = None,
        **critic: Any,
    ) -> None:
        """
        Args:
            folder: the model of both learners.
            algorithm: the algorithm, as a file gives it.
            rewards: the rewards of all responses, [2, 259].
            steps: steps of training, over which the rates fall along a cosine.
            rate: the policy's learning rate; the critic's is three times that.
            seed: seed of the draws of responses.
            reference: the reference's log-probs of all responses, [2, 259, 3]; None for those of the first policy.
            critic: further keys of the critic's configuration.
        """
        settings: dict[str, Any] = {"minibatch_size": MINIBATCH}
        self.algorithm = parse_algorithm(settings | algorithm).sized(MOST)
        self._steps, self._rewards = steps, rewards

        def optimizer(rate: float, updates: int, epochs: int) -> dict[str, Any]:
            total = updates * epochs * BATCH // self.algorithm.minibatch_size
            return {"learning_rate": rate, "schedule": "cosine", "total_steps": total, "final_fraction": 0.03}

        learned = steps - self.algorithm.critic_only_steps
        own = {"model": str(folder), "optimizer": optimizer(rate, learned, self.algorithm.epochs)}
        self.policy = PolicyTrainer(PolicyConfig.parse(own, "policy"), self.algorithm, DISTRIBUTION)
        own = {"model": str(folder), "optimizer": optimizer(3 * rate, steps, self.algorithm.epochs_of_critic)}
        self.critic = (
            CriticTrainer(CriticConfig.parse(own | critic, "critic")) if self.algorithm.needs_critic else None
        )
        self.first = self.logprobs()
        self._ref = self.first if reference is None else reference
        self._draw = np.random.default_rng(seed)

    def logprobs(self) -> Tensor:
        """The learner's log-probs of all responses, [2, 259, 3]."""
        made = torch.zeros(len(PROMPTS), COUNT, MOST, dtype=torch.float64)
        for index, prompt in enumerate(PROMPTS):
            asked = [np.asarray(prompt, np.int32)] * COUNT
            rows = logprob_rows(self.policy, asked, [np.asarray(response, np.int32) for response in RESPONSES])
            for row, numbers in enumerate(rows):
                made[index, row, : len(numbers)] = torch.from_numpy(numbers).double()
        return made

    def share(self) -> float:
        """Trains; returns the share of the gap from the first J to the best one that is closed."""
        start, best = self._objective(), known.optimum(self._ref, self._rewards)
        self.train()
        return (self._objective() - start) / (best - start)

    def train(self) -> None:
        """Takes all steps."""
        for step in range(1, self._steps + 1):
            self._step(step)

    def score(self) -> float:
        """The expected reward, exactly."""
        return float((self.logprobs().sum(-1).exp() * self._rewards).sum() / len(PROMPTS))

    def divergence(self) -> float:
        """KL(policy || first policy) of whole responses, exactly, in nats."""
        total = self.logprobs().sum(-1)
        return float((total.exp() * (total - self.first.sum(-1))).sum() / len(PROMPTS))

    def _objective(self) -> float:
        return float(known.objective(self.logprobs(), self._ref, self._rewards))

    def _step(self, step: int) -> None:
        """One step of the algorithm, on responses drawn from the policy."""
        batch = self._sampled()
        kl_coef, seed = self.algorithm.kl.coef, step - 1
        made = estimate_advantages(batch, batch.old_logprobs, self.algorithm, kl_coef, {}, step=step)
        if self.algorithm.trains_policy(step):
            self.policy.train(batch.columns.with_sampled(advantages=made.advantages), kl_coef, seed)
        if self.critic is not None:
            assert made.returns is not None
            passes = {"epochs": self.algorithm.epochs_of_critic, "minibatch_size": self.algorithm.minibatch_size}
            self.critic.train(batch.columns.with_sampled(returns=made.returns), seed=seed, **passes)

    def _sampled(self) -> Batch:
        """A batch with as many responses to each prompt, those to the same one after another; without the groups that
        the algorithm does not admit, in place of which others are drawn."""
        now = self.logprobs()
        every = experiences(Tables(now, self._ref, now, torch.zeros_like(now), self._rewards))
        # Of each response that there is, and not of each that is drawn: most are drawn several times.
        every = [replace(e, old_logprobs=e.sample.logprobs) for e in every]
        if self.critic is not None:
            pairs = [e.prompt.prompt_ids for e in every], [e.sample.response_ids for e in every]
            values = value_rows(self.critic, *pairs)
            every = [replace(e, values=row) for e, row in zip(every, values, strict=True)]
        taken, each = list[Experience](), self.algorithm.samples_per_prompt
        for index in range(len(PROMPTS)):
            p = now[index].sum(-1).exp().numpy()
            while len(taken) < (index + 1) * BATCH // len(PROMPTS):
                rows = self._draw.choice(COUNT, each, p=p / p.sum())
                if self.algorithm.admit(self._group(index, rows)):
                    taken += [every[index * COUNT + row] for row in rows.tolist()]
        drawn = collected(taken, each=each)
        return Batch.of(drawn, chosen=self.algorithm.chosen(drawn.outcomes))

    def _group(self, prompt: int, rows: np.ndarray) -> Group:
        lengths = known.LENGTHS.numpy()[rows]
        scores = self._rewards[prompt].numpy().astype(np.float32)[rows]
        return Group({SCORE: scores}, lengths, np.asarray([RESPONSES[row][-1] != known.END for row in rows]))
