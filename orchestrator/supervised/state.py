"""The state of a training on examples between two steps; all other state is the learner's."""

from typing import Literal

from quartet.config.base import Config


class ExamplesState(Config):
    """The state after `step` steps. Which examples a step takes follows from its number and the configuration."""

    format: Literal[1] = 1
    """Version of a checkpoint's format; raised when its files change."""
    step: int
    """Number of steps done."""
    examples: str
    """sha256 of the examples that are trained on. With others, or another seed, batch_size or shuffle, steps would
    take other examples."""
    seed: int
    """The configuration's."""
    batch_size: int
    """The configuration's."""
    shuffle: bool
    """The configuration's."""
    skipped_in_a_row: int = 0
    """Consecutive optimizer steps up to now whose gradient was not finite; 0 in every checkpoint."""
