"""The policy as one of the learners."""

from pathlib import Path

from orchestrator.config.run import OrchestratorConfig
from orchestrator.learners.learner import Update
from orchestrator.policy.ranks import Policy


class PolicyLearner:
    """The policy, a Learner."""

    name, prefix = "policy", "policy"

    def __init__(self, policy: Policy, config: OrchestratorConfig) -> None:
        self._policy = policy
        self._config = config

    async def train(self, update: Update) -> dict[str, float]:
        """Trains on the batch's advantages; does nothing, and measures nothing, in the critic's own steps."""
        if not self._config.algorithm.trains_policy(update.step):
            return {}
        return await self._policy.train(update.columns, update.kl_coef, update.seed)

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        """Copies the state and the model; without copies, writes them at once."""
        await self._policy.take_snapshot(str(checkpoint / self.name), step, copies)

    async def write_snapshot(self, checkpoint: Path) -> None:
        """Brings the copies to disk."""
        await self._policy.write_snapshot()

    async def restore(self, checkpoint: Path) -> None:
        """Restores the state, on ranks of the same layout."""
        await self._policy.restore(str(checkpoint / self.name))
