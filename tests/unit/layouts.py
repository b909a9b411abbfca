"""Five steps of policy and critic under any layout of the learner, for tests that compare layouts."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchestrator.algorithms.contract import KLConfig
from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner import module as trained
from quartet.learner.ema import local_share
from quartet.models.distribution import Distribution
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Floats
from quartet.wire.errors import NotFinite
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.learner_batches import CriticBatch, PolicyBatch, logprob_rows, train_critic, train_policy, value_rows
from tests.unit.rows import grouped, marks, noise, pairs

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, eps=1e-6, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5)
BY_LAYERS = {"zero_stage": 3, "zero_persist_below": 100}
STAGES: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": BY_LAYERS,
}
"""The stages of ZeRO; the third with layers that are divided, small as they are."""
TIMEOUT_S = 500
"""Longest time of a call of all ranks."""
GROUP = 2000
"""Most parameters of a group of the optimizer, of which small models have several."""
Result = dict[str, Any]
Weights = dict[str, np.ndarray]


class Bench:
    """Runs layouts, one after the other, in one rank's process."""

    def __init__(self, policy: Path, reward: Path, ranks: Ranks) -> None:
        self._policy, self._reward, self._ranks = str(policy), str(reward), ranks
        trained.GROUP_ELEMENTS = GROUP  # type: ignore[attr-defined]

    def policy(self, layout: dict[str, Any], size: int = 5, marked: bool = False, shared: bool = False) -> Result:
        """Five steps on 21 samples in minibatches of 5, the last of 1: their numbers, and what came of them. If
        `marked`, on some of their tokens; if `shared`, of responses of which each seven have one prompt."""
        config = PolicyConfig(model=self._policy, optimizer=OPTIMIZER, **layout)
        algorithm = PPO(
            epochs=1, minibatch_size=size, entropy_coef=0.01, kl=KLConfig(placement="loss", estimator="k3")
        )
        trainer = PolicyTrainer(config, algorithm, Distribution(0.7), self._ranks)
        prompts, responses = (grouped if shared else pairs)(21)
        old = logprob_rows(trainer, prompts, responses)
        batch = PolicyBatch(
            prompts=prompts,
            responses=responses,
            old_logprobs=old,
            logprobs=noise(responses, 1, old),
            ref_logprobs=noise(responses, 2, old),
            advantages=noise(responses, 3),
            kl_coef=0.1,
            trained=marks(responses) if marked else None,
        )
        steps = watched(trainer)
        train_policy(trainer, batch, seed=0)
        return {
            "steps": steps,
            "weights": joined(trainer),
            "after": logprob_rows(trainer, prompts, responses),
            "before": old,
        }

    def on_policy(
        self, layout: dict[str, Any], samples: int, algorithm: dict[str, Any] | None = None, trained: bool = True
    ) -> tuple[list[Floats], list[Floats]]:
        """Log-probs of so many samples by a pass before an update, by default of one step, and those that the update
        computed; of an update without tokens to train on if `trained` is false."""
        config = PolicyConfig(model=self._policy, optimizer=OPTIMIZER, **layout)
        settings = PPO(epochs=1, kl=KLConfig(coef=0)).model_copy(update=algorithm or {})
        trainer = PolicyTrainer(config, settings, Distribution(0.7), self._ranks)
        prompts, responses = pairs(samples)
        before, rows = logprob_rows(trainer, prompts, responses), noise(responses, 1)
        marks = None if trained else [np.zeros(len(response), bool) for response in responses]
        train_policy(
            trainer, PolicyBatch(prompts, responses, rows, None, rows, noise(responses, 3), 0.0, marks), seed=0
        )
        return before, trainer.trained_logprobs()

    def critic(self, layout: dict[str, Any], size: int = 5, marked: bool = False, shared: bool = False) -> Result:
        """The same with the critic and its values."""
        trainer = CriticTrainer(CriticConfig(model=self._reward, optimizer=OPTIMIZER, **layout), self._ranks)
        prompts, responses = (grouped if shared else pairs)(21)
        before = value_rows(trainer, prompts, responses)
        trained = marks(responses) if marked else None
        batch = CriticBatch(prompts, responses, values=before, returns=noise(responses, 4), trained=trained)
        steps = watched(trainer)
        train_critic(trainer, batch, epochs=1, minibatch_size=size, seed=0)
        return {
            "steps": steps,
            "weights": joined(trainer),
            "after": value_rows(trainer, prompts, responses),
            "before": before,
        }

    def averaged(self, layout: dict[str, Any], folder: Path) -> tuple[list[Weights], Weights, Weights]:
        """Trains five steps with a running mean and saves it to `folder`; the weights before and after each step,
        after saving, and after a sixth step."""
        config = PolicyConfig(model=self._policy, optimizer=OPTIMIZER, **layout)
        trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=5), Distribution(0.7), self._ranks)
        prompts, responses = pairs(5)
        rows = noise(responses, 1)
        batch = PolicyBatch(prompts, responses, rows, rows, rows, noise(responses, 3), 0.0)
        seen = [joined(trainer)]
        for step in range(5):
            train_policy(trainer, batch, seed=step)
            seen.append(joined(trainer))
        trainer.learner.save(folder)
        saved = joined(trainer)
        train_policy(trainer, batch, seed=5)
        return seen, saved, joined(trainer)

    def resumed(self, layout: dict[str, Any], folder: Path, which: str, copies: bool = True) -> tuple[Result, Result]:
        """Six steps of the policy or the critic, with dropout; and the same from a snapshot after three, which two
        more steps are taken beside: what came of both."""
        snapshot = folder / which
        trainer = self._trainer(layout, which)
        self._steps(trainer, 0, 3)
        trainer.learner.take_snapshot(snapshot, 3, copies=copies)
        self._steps(trainer, 3, 5)
        trainer.learner.write_snapshot()
        straight = self._steps(trainer, 5, 6)
        trainer = self._trainer(layout, which)
        assert trainer.learner.restore(snapshot) == 3
        self._steps(trainer, 3, 5)
        return straight, self._steps(trainer, 5, 6)

    def _trainer(self, layout: dict[str, Any], which: str, dropout: float = 0.2) -> PolicyTrainer | CriticTrainer:
        if which == "critic":
            critic = CriticConfig(model=self._reward, optimizer=OPTIMIZER, **layout)
            made: PolicyTrainer | CriticTrainer = CriticTrainer(critic, self._ranks)
        else:
            policy = PolicyConfig(model=self._policy, optimizer=OPTIMIZER, **layout)
            made = PolicyTrainer(policy, PPO(epochs=1, minibatch_size=5), Distribution(0.7), self._ranks)
        for module in made.learner.module.modules():
            # Random numbers in training, so that a wrong random state shows.
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        return made

    def _steps(self, trainer: PolicyTrainer | CriticTrainer, first: int, end: int) -> Result:
        steps = watched(trainer)
        for step in range(first, end):
            prompts, responses = pairs(5, seed=step)
            rows = noise(responses, 1)
            if isinstance(trainer, CriticTrainer):
                train_critic(
                    trainer, CriticBatch(prompts, responses, rows, rows), epochs=1, minibatch_size=5, seed=step
                )
            else:
                train_policy(
                    trainer, PolicyBatch(prompts, responses, rows, rows, rows, noise(responses, 3), 0.0), seed=step
                )
        average = trainer.learner._average
        means = [mean.clone().numpy() for mean in average.means] if average else []
        return {"steps": steps, "weights": joined(trainer), "averages": means}

    def skipping(self, layout: dict[str, Any], which: str) -> tuple[Result, Result, list[dict[str, float]]]:
        """Two steps; and the same two with two between them whose gradient is not finite on the rank that has the
        wrong row: what came of both, and what the trainer said of those two and the last."""
        straight = self._trainer(layout, which, dropout=0.0)
        self._steps(straight, 0, 1)
        wanted = self._steps(straight, 1, 2)
        trainer = self._trainer(layout, which, dropout=0.0)
        self._steps(trainer, 0, 1)
        said = [self._poisoned(trainer, value) for value in (float("nan"), float("inf"))]
        actual = self._steps(trainer, 1, 2)
        said.append({"skipped_in_a_row": float(trainer.learner.skipped_in_a_row)})
        return actual, wanted, said

    def _poisoned(self, trainer: PolicyTrainer | CriticTrainer, value: float) -> dict[str, float]:
        """A batch of which the first number of one row makes the gradient NaN."""
        prompts, responses = pairs(5, seed=9)
        rows, wrong = noise(responses, 1), noise(responses, 3)
        wrong[2][0] = value
        if isinstance(trainer, CriticTrainer):
            return train_critic(
                trainer, CriticBatch(prompts, responses, rows, wrong), epochs=1, minibatch_size=5, seed=9
            )
        return train_policy(trainer, PolicyBatch(prompts, responses, rows, rows, rows, wrong, 0.0), seed=9)

    def refusing(self, layout: dict[str, Any], folder: Path) -> list[str]:
        """The errors of saving, checkpointing and pushing weights of which one number on one rank is NaN."""
        trainer = self._trainer(layout, "policy")
        assert isinstance(trainer, PolicyTrainer)
        if self._ranks.rank == self._ranks.world_size - 1:
            local_share(next(trainer.learner.module.parameters())).view(-1)[0] = float("nan")
        said = []
        for refuse in (
            partial(trainer.learner.save, folder / "model"),
            partial(trainer.learner.take_snapshot, folder / "snapshot", 1),
            partial(trainer.sending.gather, 1),
        ):
            try:
                refuse()
            except NotFinite as error:
                said.append(str(error))
        return said

    def in_garbage(self, layout: dict[str, Any], folder: Path, which: str) -> tuple[Result, Result]:
        """Six steps, on the way a snapshot and a running mean; and the same where all memory is NaN until something
        is written to it: what came of both."""
        straight, _ = self.resumed(layout, folder / "zeros", which)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            return straight, self.resumed(layout, folder / "garbage", which)[1]
        finally:
            torch.use_deterministic_algorithms(False)

    def pushed(self, layout: dict[str, Any]) -> dict[int, bytes]:
        """Digests of the buckets that rank 0 sends of the untrained policy."""
        config = PolicyConfig(model=self._policy, optimizer=OPTIMIZER, **layout)
        trainer = PolicyTrainer(config, PPO(), Distribution(0.7), self._ranks)
        if first := self._ranks.rank == 0:
            trainer.sending.rendezvous("gloo", host="127.0.0.1", bucket_bytes=1 << 14, stall_s=5)
            trainer.sending.join(1, 1)
        trainer.sending.gather(1)
        return trainer.sending.send(1) if first else {}

    def held(self, layout: dict[str, Any], which: str) -> int:
        """Number of the model's numbers that this rank has."""
        return sum(p.numel() for p in self._trainer(layout, which).learner.module.parameters())

    def saved(self, layout: dict[str, Any], folder: Path) -> None:
        """Saves both models, untrained, under `folder`."""
        policy = PolicyConfig(model=self._policy, optimizer=OPTIMIZER, **layout)
        PolicyTrainer(policy, PPO(), Distribution(0.7), self._ranks).learner.save(folder / "policy")
        critic = CriticConfig(model=self._reward, optimizer=OPTIMIZER, **layout)
        CriticTrainer(critic, self._ranks).learner.save(folder / "critic")


def watched(trainer: PolicyTrainer | CriticTrainer) -> list[dict[str, float]]:
    """The numbers of each step that `trainer` takes from now on."""
    steps: list[dict[str, float]] = []
    step = trainer.learner.step

    def watch(*arguments: Any) -> dict[str, float]:
        steps.append(step(*arguments))
        return steps[-1]

    trainer.learner.step = watch  # type: ignore[method-assign, assignment]
    return steps


def joined(trainer: PolicyTrainer | CriticTrainer) -> Weights:
    """Every parameter in float32, by name."""
    weights = trainer.learner.full_weights()
    return {name: tensor.float().cpu().clone().numpy() for name, tensor in weights}
