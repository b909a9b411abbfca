"""What the PPO loop carries from step to step; all else is the learners'."""

from typing import Literal, Self

from orchestrator.ppo import RunningNormaliser
from services.common.config import Config


class TrainState(Config):
    """The loop after `step` steps. With policy and critic as of then, all that the next step depends on: prompts and
    seeds follow from the configuration and the step's number."""

    format: Literal[1] = 1
    """Of a checkpoint's folder; raised when its files change."""
    step: int
    """PPO steps done."""
    policy_version: int
    """What the rollout replicas serve. Services that served another run have counted further than `step`."""
    critic_step: int
    """The critic's last training step, likewise."""
    kl_coef: float
    """Coefficient of the KL penalty in the next batch."""
    normaliser: RunningNormaliser = RunningNormaliser()
    """Of the scores so far."""
    samples_asked: int = 0
    """Of the rollout service, since the run began, repetitions included."""
    samples_used: int = 0
    """To train on, since the run began: each once."""

    def after(self, *, kl_coef: float, normaliser: RunningNormaliser, asked: int, used: int) -> Self:
        """The loop one step further."""
        return self.model_copy(
            update={
                "step": self.step + 1,
                "policy_version": self.policy_version + 1,
                "critic_step": self.critic_step + 1,
                "kl_coef": kl_coef,
                "normaliser": normaliser,
                "samples_asked": self.samples_asked + asked,
                "samples_used": self.samples_used + used,
            }
        )
