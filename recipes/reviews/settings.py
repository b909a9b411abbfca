"""Everything that decides what the recipe makes."""

from dataclasses import dataclass, field

from recipes.common.shape import Shape
from recipes.reviews.grammar import Style


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are the demo; tests make smaller ones."""

    seed: int = 0
    """Seed of the split, the data and the weights."""
    held_out: float = 0.25
    """Share of the prompts that no training sees."""
    shape: Shape = field(default_factory=Shape)
    """Size of policy and reward model."""
    max_new_tokens: int = 32
    """Longest response, `<eos>` included."""

    style: Style = field(default_factory=Style)
    """Style of the reviews that the policy first learns from."""
    supervised_steps: int = 400
    supervised_batch: int = 64
    supervised_rate: float = 3e-3

    preferences: int = 4000
    """Pairs of reviews that the reward model learns from."""
    sharpness: float = 4.0
    """The better review is preferred with probability sigmoid(sharpness * difference in gold score)."""
    reward_epochs: int = 3
    reward_batch: int = 64
    reward_rate: float = 1e-3

    measured: int = 512
    """Samples behind each measure: the reward model's accuracy, the policy's gold score."""
