"""The losses after which a run resumes from its last checkpoint, and the limit on such restarts."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from orchestrator.config.checkpoint import SnapshotsConfig
from orchestrator.learners import LOSSES
from orchestrator.loop.checkpoint_folder import Checkpoint
from orchestrator.push.pusher import PushFailed
from quartet.wire.errors import DeadlineExceeded, LeaseLost, OffTimeline, Unavailable, leaves, reasons

Kept = TypeVar("Kept", bound=Checkpoint[Any])

RECOVERABLE = (*LOSSES, Unavailable, DeadlineExceeded, PushFailed, OffTimeline)
"""Errors that new learners and a first push to all replicas may mend. A push also fails where the learner's sender
stands still, and a replica is off the run's timeline where no push reached it."""


def is_loss(error: BaseException) -> bool:
    """True if the failure is recoverable by restarting from a checkpoint; false for bad input."""
    errors = leaves(error)
    if any(isinstance(leaf, LeaseLost) for leaf in errors):
        return False
    return any(isinstance(leaf, RECOVERABLE) for leaf in errors)


async def restarting(
    carry_out: Callable[[Kept | None, int], Awaitable[None]],
    checkpoint: Kept | None,
    last: Callable[[], Kept | None],
    config: SnapshotsConfig,
    note: Callable[[str], None],
) -> None:
    """Carries out a run, again from its last checkpoint after each loss, as often as is configured.

    Progress since the last restart renews all restarts: of 3, a run may make three at step 10, and then three at
    step 20.

    Args:
        carry_out: trains from a checkpoint, or from the start, to the end; its second argument counts tries from 0.
        checkpoint: the checkpoint to begin with, if any.
        last: the last checkpoint on disk.
        config: the configuration of checkpoints.
        note: called with messages for the user.

    Raises:
        Exception: an error of `carry_out` that restarts do not mend, or one loss too many.
    """
    reached, left = -1, config.restarts
    for attempt in itertools.count():
        try:
            await carry_out(checkpoint, attempt)
            return
        except Exception as error:
            checkpoint = last()
            # Without a checkpoint nothing has been trained yet, as the first is taken before step 1.
            step = checkpoint.state.step if checkpoint else 0
            if step > reached:
                reached, left = step, config.restarts
            can_return = checkpoint is not None or config.every > 0
            if not can_return or not is_loss(error) or not left:
                raise
            left -= 1
            again = f"resuming after step {step}" if checkpoint else "beginning again at step 1"
            note(f"interrupted ({reasons(error)}); {again}")
