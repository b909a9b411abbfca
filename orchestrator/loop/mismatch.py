"""A watch on the difference between the rollout engine's and the learner's log-probs, which a push's probe may
miss."""

from collections.abc import Callable, Mapping

from orchestrator.config.loop import LoopConfig
from orchestrator.push.tolerance import Tolerance

BOUNDS = {"float32": (1e-3, 0.02), "bfloat16": (0.05, 0.2)}
"""Least and most of the default limit, in nats per token."""
MEASURED = "mismatch/present_mean_abs"


class MismatchError(RuntimeError):
    """The rollout engine sampled from another policy than the learner's in several steps in a row."""


class MismatchWatch:
    """Warns of a step whose mismatch is beyond the limit, and ends the run after several in a row."""

    def __init__(self, config: LoopConfig, dtype: str, note: Callable[[str], None]) -> None:
        """
        Args:
            config: the limit, and the number of steps.
            dtype: the policy's dtype, which determines the default limit.
            note: shows a message to the user.
        """
        self._limit = Tolerance.of(config.mismatch_limit, BOUNDS[dtype])
        self._steps = config.mismatch_steps
        self._note = note
        self._beyond = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks the metrics of `step`. Tokens of older versions may differ and are not checked; nor is a step that
        has no others.

        Raises:
            MismatchError: the difference was beyond the limit for too many steps.
        """
        difference = metrics.get(MEASURED)
        if difference is None:
            return
        limit = self._limit.now
        if difference <= limit:
            self._limit.learn(difference)
            self._beyond = 0
            return
        self._beyond += 1
        said = (
            f"step {step}: {MEASURED} is {difference:.3g} nats, beyond loop.mismatch_limit {limit:.3g} "
            f"({self._beyond} of {self._steps} steps in a row)"
        )
        if self._beyond >= self._steps:
            raise MismatchError(
                f"{said}: the rollout engine does not sample from the policy that is trained (largest "
                f"difference {metrics['mismatch/max_abs']:.3g} nats, KL {metrics['mismatch/kl']:.3g}); compare the "
                "dtypes, or raise loop.mismatch_limit"
            )
        self._note(said)
