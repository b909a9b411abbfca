"""Checkpoints."""

from pydantic import NonNegativeInt

from quartet.config.base import Config, Count, Seconds


class SnapshotsConfig(Config):
    """Checkpoints of learners, and restarts after one is lost."""

    every: NonNegativeInt = 10
    """Steps between checkpoints; the first is taken before step 1, and one more after the last step. 0: never; then
    the run cannot be resumed, and the death of a learner ends it."""
    keep: Count = 2
    """Number of newest checkpoints that are kept."""
    background: bool = True
    """Write while training continues, from copies in the host memory of each learner's ranks. False: training waits
    for the writing, and no copies are made."""
    restarts: NonNegativeInt = 3
    """Times that the run goes back to its last checkpoint by itself because a learner's rank was lost, or something
    did not answer in time, until there is a newer one; then the loss ends it. Before its first checkpoint it begins
    again instead. 0: the first loss ends it."""
    max_skipped_steps: Count = 8
    """The run ends after this many optimizer steps of a learner in a row were skipped because their gradient is not
    finite. No checkpoint is taken meanwhile, so that the last one is of finite weights."""
    timeout_s: Seconds = 1800
    """Longest that taking, writing or restoring one may take."""


class CheckpointConfig(SnapshotsConfig):
    """Checkpoints of a PPO run."""

    root: str = "runs"
    """Folder above all checkpoints; the same as the critic's `root`, which writes nowhere else. With learners on
    several nodes it must be on a disk that all of them share."""
    folder: str | None = None
    """Folder of this run's checkpoints under the root, as a path from here. Null: <root>/<name>/checkpoints."""
    journal: bool = True
    """Keep on disk what each step since the last checkpoint was trained on, so that going back to it samples nothing
    again and ends with the same weights."""
