"""One run: batches of samples that an older version made, and the learners' updates on them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.lag.task import PROMPTS, VOCABULARY, make_model, sample, score
from orchestrator.algorithm.rewards import RunningNormaliser
from orchestrator.config.algorithm import PPOConfig
from orchestrator.data.prompts import Prompt
from orchestrator.experience.experience import Collected, Experience
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import estimate_advantages
from orchestrator.policy.trainer import PolicyBatch, PolicyTrainer
from quartet.config.learner import PolicyConfig
from quartet.models.distribution import Distribution
from services.critic.config import CriticConfig
from services.critic.trainer import CriticBatch, CriticTrainer

NONE = "none"
"""Correction of a run that takes every sample for one of its own: weights of 1."""
BATCH = 64
BETAS = (0.9, 0.999)
CRITIC_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that runs with different seeds share."""

    correction: str
    """ppo.correction, or NONE."""
    lag: int
    """Versions between the one that samples a batch and the one that trains on it, once there are so many."""
    learning_rate: float
    steps: int

    @property
    def ppo(self) -> PPOConfig:
        """The algorithm: GAE without a KL penalty, and one optimizer step a batch, for which nothing is clipped."""
        weights = {"importance_cap": None} if self.correction == NONE else {"correction": self.correction}
        update = {"epochs": 1, "minibatch_size": BATCH, "kl": {"coef": 0.0}}
        return PPOConfig.parse(update | weights, "ppo")

    def __str__(self) -> str:
        return f"s = {self.lag}, {'no correction' if self.correction == NONE else self.correction}"


class Learners:
    """A policy and its critic, as the policy's actor and the critic's service train them."""

    def __init__(self, folder: Path, setting: Setting, seed: int) -> None:
        self._ppo = setting.ppo
        policy = {"model": str(folder), "optimizer": {"learning_rate": setting.learning_rate, "betas": BETAS}}
        critic: dict[str, Any] = {"model": str(folder), "optimizer": {"learning_rate": CRITIC_RATE}, "seed": seed}
        distribution = Distribution(vocabulary=VOCABULARY)
        self.policy = PolicyTrainer(PolicyConfig.parse(policy, "policy"), self._ppo, distribution)
        self.critic = CriticTrainer(CriticConfig.parse(critic | {"value_clip_eps": None}, "critic"))

    def weights(self) -> dict[str, Tensor]:
        """A copy of the policy's weights."""
        return {name: tensor.clone() for name, tensor in self.policy._learner.module.state_dict().items()}

    def train(self, batch: Batch, seed: int) -> None:
        """Carries out a step of the algorithm with these samples, which have their values already."""
        prompts, responses = batch.prompts, batch.responses
        old = self.policy.logprobs(prompts, responses)
        estimate = estimate_advantages(batch, batch.padded(old), self._ppo, 0.0, RunningNormaliser())
        logprobs, values = [e.sample.logprobs for e in batch.experiences], [e.values for e in batch.experiences]
        self.policy.train(
            PolicyBatch(prompts, responses, logprobs, old, None, estimate.advantages, kl_coef=0.0), seed
        )
        passes = {"epochs": self._ppo.epochs, "minibatch_size": self._ppo.minibatch_size}
        self.critic.train(CriticBatch(prompts, responses, values, estimate.returns), seed=seed, **passes)


class Behaviour:
    """The policy of some versions ago, from which responses are sampled."""

    def __init__(self, folder: Path, setting: Setting, seed: int) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
        self._versions: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=setting.lag + 1)
        self._prompts, self._tokens = np.random.default_rng(seed), torch.Generator().manual_seed(seed)

    def push(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Receives a version, from which responses will be sampled when `lag` others have followed."""
        self._versions.append((version, weights))

    def batch(self, critic: CriticTrainer) -> Batch:
        """A batch of responses by the oldest of the versions that are kept, with the values of the present critic."""
        version, weights = self._versions[0]
        self._model.load_state_dict(weights)
        prompts = [
            Prompt(row, np.asarray([row], np.int32), "", "")
            for row in self._prompts.integers(PROMPTS.start, PROMPTS.stop, BATCH).tolist()
        ]
        samples = sample(self._model, [prompt.prompt_ids for prompt in prompts], version, self._tokens)
        values = critic.values([prompt.prompt_ids for prompt in prompts], [each.response_ids for each in samples])
        nothing = np.empty(0, np.float32)
        experiences = [
            Experience(each.index, prompt, each, score(len(each.response_ids)), nothing, valued)
            for prompt, each, valued in zip(prompts, samples, values, strict=True)
        ]
        return Batch.of(Collected(experiences, 0.0, 0.0))


def train(setting: Setting, seed: int) -> list[float]:
    """Trains once; returns the mean score of each batch."""
    scores = []
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder), seed)
        learners, behaviour = Learners(model, setting, seed), Behaviour(model, setting, seed)
        for step in range(setting.steps):
            behaviour.push(step, learners.weights())
            batch = behaviour.batch(learners.critic)
            learners.train(batch, seed * 1_000_003 + step)
            scores.append(float(batch.scores.mean()))
    return scores
