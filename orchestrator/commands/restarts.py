"""The losses after which a run resumes from its last checkpoint, and the limit on such restarts."""

from orchestrator.learners.learner import LOSSES
from orchestrator.push.pusher import PushFailed
from quartet.wire.errors import DeadlineExceeded, LeaseLost, OffTimeline, Unavailable, leaves

RECOVERABLE = (*LOSSES, Unavailable, DeadlineExceeded, PushFailed, OffTimeline)
"""Errors that new learners and a first push to all replicas may mend. A push also fails where the learner's sender
stands still, and a replica is off the run's timeline where no push reached it."""


class Restarts:
    """Counts the restarts that a run may still make."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed
        self._step = -1

    def spend(self, step: int) -> bool:
        """True if the run may restart from `step`; uses up one restart. Progress since the last restart renews all of
        them: with 3 allowed, a run may restart three times at step 10 and then three times at step 20."""
        if step > self._step:
            self._step, self._left = step, self._allowed
        self._left -= 1
        return self._left >= 0


def is_loss(error: BaseException) -> bool:
    """True if the failure is recoverable by restarting from a checkpoint; false for bad input."""
    errors = leaves(error)
    if any(isinstance(leaf, LeaseLost) for leaf in errors):
        return False
    return any(isinstance(leaf, RECOVERABLE) for leaf in errors)
