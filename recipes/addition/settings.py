"""Everything that decides what the recipe makes."""

from dataclasses import dataclass, field

from recipes.common.shape import Shape


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are the recipe; tests make smaller ones."""

    seed: int = 0
    """Seed of the split, the data and the weights."""
    train_problems: int = 2700
    held_out_problems: int = 500
    """Problems that the policy is not trained on."""
    shape: Shape = field(default_factory=lambda: Shape(hidden=96, heads=3))
    """Size of the policy."""
    max_new_tokens: int = 8
    """Longest answer, `<eos>` included."""

    steps: int = 550
    batch: int = 128
    rate: float = 4e-3
    careful: float = 0.7
    """Share of the steps, the first ones, that show right answers only: noise alone does not teach to add."""
    slip: float = 0.55
    """Share of wrong answers in the steps after that. PPO has them to win back."""
