"""Training on sampled responses of the problem with a known optimum, by Quartet's own estimates and trainers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import estimate_advantages
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import PolicyConfig
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.learner_batches import logprob_rows, value_rows
from tests.unit import known_optimum as known
from tests.unit.expected_gradients import DISTRIBUTION, Tables, experiences
from tests.unit.experiences import collected
from tests.unit.known_optimum import BETA, COUNT, MOST, PROMPTS, RESPONSES

BATCH, MINIBATCH, EPOCHS = 1024, 256, 2


class Learning:
    """A policy that starts as its own reference, and its critic if the estimate needs one."""

    def __init__(self, folder: Path, algorithm: dict[str, Any], rewards: Tensor, *, steps: int, rate: float) -> None:
        """
        Args:
            folder: the model of both learners.
            algorithm: the algorithm.
            rewards: the rewards of all responses, [2, 259].
            steps: steps of training, over which the rates fall along a cosine.
            rate: the policy's learning rate; the critic's is three times that.
        """
        penalty = {"coef": BETA, "placement": "reward", "estimator": "k1"}  # J's, also for kinds that have another
        settings = {"score_clip": None, "minibatch_size": MINIBATCH, "epochs": EPOCHS, "kl": penalty}
        self.algorithm = parse_algorithm(settings | algorithm).sized(MOST)
        schedule = {
            "schedule": "cosine",
            "total_steps": steps * EPOCHS * BATCH // MINIBATCH,
            "final_fraction": 0.03,
        }
        optimizers = [{"learning_rate": factor * rate} | schedule for factor in (1, 3)]
        config = PolicyConfig.parse({"model": str(folder), "optimizer": optimizers[0]}, "policy")
        self.policy = PolicyTrainer(config, self.algorithm, DISTRIBUTION)
        critic = CriticConfig.parse({"model": str(folder), "optimizer": optimizers[1]}, "critic")
        self.critic = CriticTrainer(critic) if self.algorithm.needs_critic else None
        self._steps, self._ref, self._rewards = steps, self.logprobs(), rewards
        self._draw = np.random.default_rng(0)

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
        for step in range(self._steps):
            self._step(step)
        return (self._objective() - start) / (best - start)

    def _objective(self) -> float:
        return float(known.objective(self.logprobs(), self._ref, self._rewards))

    def _step(self, step: int) -> None:
        """One step of the algorithm, on responses drawn from the policy."""
        batch = self._sampled()
        made = estimate_advantages(batch, batch.old_logprobs, self.algorithm, BETA, {}, step=1)
        self.policy.train(batch.columns.with_sampled(advantages=made.advantages), BETA, step)
        if self.critic is not None:
            assert made.returns is not None
            passes = {"epochs": self.algorithm.epochs_of_critic, "minibatch_size": self.algorithm.minibatch_size}
            self.critic.train(batch.columns.with_sampled(returns=made.returns), seed=step, **passes)

    def _sampled(self) -> Batch:
        """A batch with as many responses to each prompt, those to the same one after another."""
        now = self.logprobs()
        every = experiences(Tables(now, self._ref, now, torch.zeros_like(now), self._rewards))
        # Of each response that there is, and not of each that is drawn: most are drawn several times.
        every = [replace(e, old_logprobs=e.sample.logprobs) for e in every]
        if self.critic is not None:
            pairs = [e.prompt.prompt_ids for e in every], [e.sample.response_ids for e in every]
            values = value_rows(self.critic, *pairs)
            every = [replace(e, values=row) for e, row in zip(every, values, strict=True)]
        taken = []
        for index in range(len(PROMPTS)):
            p = now[index].sum(-1).exp().numpy()
            rows = self._draw.choice(COUNT, BATCH // len(PROMPTS), p=p / p.sum())
            taken += [every[index * COUNT + row] for row in rows.tolist()]
        return Batch.of(collected(taken, each=self.algorithm.samples_per_prompt))
